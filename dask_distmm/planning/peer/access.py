"""Whether GPUs can read each other's memory: what the peer engine needs of its workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dask_distmm.planning.demand import Worker


def out_of_reach(workers: Sequence[Worker]) -> str:
    """Say why not every worker's GPU can read the memory of all others; empty if it can."""
    for reader in workers:
        for other in workers:
            if reader.host != other.host:
                return f"{reader.address} is on host {reader.host!r}, {other.address} on {other.host!r}"
            if not (reader.device and other.device):
                silent = other if reader.device else reader
                return f"{silent.address} does not say which GPU it has"
            if reader.device != other.device and other.device not in reader.reach:
                return (
                    f"the GPU of {reader.address} ({reader.device}) can't read the memory of that of {other.address} "
                    f"({other.device}): they have no NVLink or PCIe peer access, or the process does not see both "
                    "(CUDA_VISIBLE_DEVICES; dask-cuda shows all)"
                )
    return ""


def reaches(reader: Worker, other: Worker) -> bool:
    """Whether a worker's GPU can read the memory of another one's, as far as they have said anything."""
    return reader.host == other.host and (reader.device == other.device or other.device in reader.reach)
