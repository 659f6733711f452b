"""One rank of ``nvmath.distributed.linalg.advanced.matmul``: reads A and B, writes its part of D for each case.

``python nvmath_oracle.py RANK SIZE PORT FOLDER``: FOLDER holds ``cases.json`` and an ``a.npy`` and ``b.npy`` a case.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import accumulate
from pathlib import Path

import ml_dtypes
import numpy as np


def load(path, dtype):
    found = np.load(path)
    return found.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else found


def main(rank, size, port, folder):
    import nvmath.distributed
    import torch
    import torch.distributed as dist
    from nvmath.distributed.distribution import Slab
    from nvmath.distributed.linalg.advanced import matmul

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, device_id=device)
    group = nvmath.distributed.TorchProcessGroup(device_id=rank)
    nvmath.distributed.initialize(rank, group, backends=["nccl"])

    def cut(length):
        width = -(-length // size)
        edges = [min(x, length) for x in accumulate([width] * size, initial=0)]
        return slice(edges[rank], edges[rank + 1])

    def to_device(x, dtype):
        """In Fortran order, as nvmath wants it."""
        columns = np.ascontiguousarray(x.T)
        if dtype == "bfloat16":
            return torch.from_numpy(columns.view(np.int16)).to(device).view(torch.bfloat16).t()
        return torch.from_numpy(columns).to(device).t()

    torch.cuda.set_stream(torch.cuda.Stream())
    for case in json.loads((folder / "cases.json").read_text()):
        name, dtype, method = case["name"], case["dtype"], case["method"]
        a, b = (load(folder / f"{name}-{operand}.npy", dtype) for operand in "ab")
        if method == "allgather":
            a, b = a[cut(a.shape[0])], b[:, cut(b.shape[1])]
            distributions = [Slab.X, Slab.Y, Slab.X]
        else:
            a, b = a[:, cut(a.shape[1])], b[cut(b.shape[0])]
            distributions = [Slab.Y, Slab.X, Slab.Y]
        d = matmul(to_device(a, dtype), to_device(b, dtype), distributions=distributions)
        torch.cuda.synchronize()
        d = d.cpu()
        d = d.view(torch.int16).numpy() if dtype == "bfloat16" else d.numpy()
        np.save(folder / f"{name}-d{rank}.npy", d)
    dist.barrier()
    # What nvmath and PyTorch do at exit is not what is tested.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
