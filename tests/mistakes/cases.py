"""Mistakes of users: in programs, in the configuration, on the command line. Each is a title and what is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import get_client

import dask_distmm as dd
from dask_distmm import BlockCyclic, Matmul, Slab, explain, linalg, matmul, matmul_grouped, quantize


def ones(*shape: int, dtype: str = "float64") -> da.Array:
    return da.ones(shape, chunks=10, dtype=dtype)


A, B, V = ones(20, 30), ones(30, 20), ones(20)
Q = ones(20, 20)


class DataFrame:
    """Has what tells one from an array."""

    columns = dtypes = shape = ndim = None


class DaskDataFrame(DataFrame):
    """Has what tells one of Dask's from an array."""

    to_dask_array = __dask_graph__ = __dask_keys__ = lambda self: {"x": 1}


def with_config(key: str, value: Any) -> Callable[[], Any]:
    def call() -> Any:
        with dask.config.set({f"distmm.{key}": value}):
            return matmul(A, B)

    return call


def under_enable(key: str, value: Any) -> Callable[[], Any]:
    def call() -> Any:
        with dask.config.set({f"distmm.{key}": value}), dd.enabled():
            return A @ B

    return call


def enabled(call: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        with dd.enabled():
            return call()

    return made


def planned() -> Matmul:
    return Matmul(A, B)


# Done without a cluster.
ALONE: dict[str, Callable[[], Any]] = {
    "a method, and no cluster": lambda: matmul(A, B, method="summa"),
    "an engine, and no cluster": lambda: matmul(A, B, engine="cublasmp"),
    "workers, and no cluster": lambda: matmul(A, B, workers=4),
    "distributions, and no cluster": lambda: matmul(A, B, distributions=[Slab(0)]),
    "a compute type, and no cluster": lambda: matmul(Q, Q, compute_type="fp64_emulated"),
    "a collective batch, and no cluster": lambda: matmul(ones(2, 9, 9), ones(2, 9, 9), batch="collective"),
    "a group with a method, and no cluster": lambda: matmul_grouped([(A, B)], method="summa"),
    "a Matmul, and no cluster": lambda: Matmul(A, B),
    "free_workspaces, and no cluster": dd.free_workspaces,
}

# Done with a cluster of workers in this process.
IN_PROGRAMS: dict[str, Callable[[], Any]] = {
    "shapes that don't match": lambda: matmul(A, A),
    "batches that don't match": lambda: matmul(ones(2, 9, 9), ones(3, 9, 9)),
    "a scalar": lambda: matmul(A, 2.0),
    "a text": lambda: matmul(A, "x"),
    "dates": lambda: matmul(da.from_array(np.zeros((20, 20), "M8[s]"), chunks=10), Q),
    "texts": lambda: matmul(da.from_array(np.zeros((20, 20), "U3"), chunks=10), Q),
    "records": lambda: matmul(da.from_array(np.zeros((20, 20), "i4,f8"), chunks=10), Q),
    "a DataFrame": lambda: matmul(A, DataFrame()),
    "a Dask DataFrame": lambda: matmul(A, DaskDataFrame()),
    "None": lambda: matmul(A, None),
    "a Future": lambda: matmul(A, get_client().submit(np.ones, (30, 20))),
    "a list of Futures": lambda: matmul(A, [get_client().submit(np.ones, 20)]),
    "a Delayed": lambda: matmul(A, dask.delayed(np.ones)((30, 20))),
    "a dict": lambda: matmul(A, {"b": B}),
    "shapes that don't match, under enable()": enabled(lambda: A @ A),
    "axes that don't match, under enable()": enabled(lambda: da.tensordot(A, A, axes=1)),
    "unknown chunk sizes": lambda: matmul(Q[Q[:, 0] > 0], Q),
    "explain of unknown chunk sizes": lambda: explain(Q[Q[:, 0] > 0], Q),
    "objects and a method": lambda: matmul(Q.astype(object), Q, method="summa"),
    "objects and explain": lambda: explain(Q.astype(object), Q),
    "objects and bias": lambda: matmul(Q.astype(object), Q, epilog="bias", epilog_inputs={"bias": V}),
    "explain of a result that is in memory": lambda: explain(matmul(A, B).persist()),
    "explain of a result, and an option": lambda: explain(matmul(A, B), method="summa"),
    "a misspelt method": lambda: matmul(A, B, method="suma"),
    "a misspelt engine": lambda: matmul(A, B, engine="nunpy"),
    "the engine cublasmp, which no worker has": lambda: matmul(A, B, engine="cublasmp"),
    "a misspelt epilog": lambda: matmul(A, B, epilog="rellu"),
    "an epilog that is nothing like one": lambda: matmul(A, B, epilog="xyzzy"),
    "an epilog that is a number": lambda: matmul(A, B, epilog=3),
    "an argument that others have": lambda: matmul(Q, Q, bias=V),
    "a misspelt argument": lambda: matmul(A, B, methd="summa"),
    "only one operand": lambda: matmul(A),
    "a transpose in small letters": lambda: matmul(A, B, op_a="t"),
    "a transposed vector": lambda: matmul(V, Q, op_a="T"),
    "an epilog without its input": lambda: matmul(Q, Q, epilog="relu_bias"),
    "inputs without an epilog": lambda: matmul(Q, Q, epilog_inputs={"bias": V}),
    "unknown inputs without an epilog": lambda: matmul(Q, Q, epilog_inputs={"weights": V}),
    "an input that the epilog does not read": lambda: matmul(Q, Q, epilog="relu", epilog_inputs={"bias": V}),
    "a bias of another length": lambda: matmul(Q, Q, epilog="bias", epilog_inputs={"bias": ones(7)}),
    "a bias axis that is none": lambda: matmul(Q, Q, bias_axis=2),
    "a function that fails": lambda: matmul(Q, Q, epilog=lambda x: x.nothing),
    "a function that sums": lambda: matmul(Q, Q, epilog=lambda x: x.sum()),
    "C without beta": lambda: matmul(Q, Q, Q),
    "beta without C": lambda: matmul(Q, Q, beta=2.0),
    "C of another shape": lambda: matmul(Q, Q, ones(7, 7), beta=1.0),
    "alpha that is a text": lambda: matmul(Q, Q, alpha="two"),
    "alpha that is complex": lambda: matmul(Q, Q, alpha=1j),
    "alpha for integers": lambda: matmul(ones(9, 9, dtype="int64"), ones(9, 9, dtype="int64"), alpha=2),
    "chunks of zero": lambda: matmul(Q, Q, out_chunks=(0, 1)),
    "chunks that don't add up": lambda: matmul(Q, Q, out_chunks=((5, 5), (20,))),
    "chunks for three axes": lambda: matmul(Q, Q, out_chunks=(5, 5, 5)),
    "chunks for a vector": lambda: matmul(Q, V, out_chunks=(5,)),
    "no workers": lambda: matmul(Q, Q, workers=0),
    "workers that are not there": lambda: matmul(Q, Q, workers=["tcp://10.0.0.1:1"]),
    "more workers than there are": lambda: matmul(Q, Q, workers=99),
    "workers that are numbers": lambda: matmul(Q, Q, workers=[1, 2]),
    "a distribution that is a text": lambda: matmul(Q, Q, distributions="rows"),
    "slabs along a third axis": lambda: matmul(Q, Q, distributions=[Slab(2)]),
    "blocks of zero": lambda: matmul(Q, Q, distributions=[BlockCyclic((1, 2), (0, 5))]),
    "a batch way for matrices": lambda: matmul(Q, Q, batch="items"),
    "a misspelt batch way": lambda: matmul(ones(2, 9, 9), ones(2, 9, 9), batch="item"),
    "plain tasks and a method": lambda: matmul(ones(2, 9, 9), ones(2, 9, 9), batch="items", method="summa"),
    "a compute type for other operands": lambda: matmul(Q, Q, compute_type="tf32"),
    "a misspelt compute type": lambda: matmul(Q, Q, compute_type="tf23"),
    "a result type that is none": lambda: matmul(Q, Q, result_type="floatt32"),
    "a result type that can't be": lambda: matmul(Q, Q, result_type="int8"),
    "FP8 without scales": lambda: matmul(quantize(Q, "float8_e4m3")[0], quantize(Q, "float8_e4m3")[0]),
    "FP8 by another type": lambda: matmul(quantize(Q, "float8_e4m3")[0], Q),
    "quantize to another type": lambda: quantize(Q, "int3"),
    "a group of two arrays": lambda: matmul_grouped(A, B),
    "a group that is an array": lambda: matmul_grouped(A),
    "a group of arrays": lambda: matmul_grouped([A, B]),
    "a group with shapes that don't match": lambda: matmul_grouped([(A, B), (A, A)]),
    "a group with a bias": lambda: matmul_grouped([(Q, Q)], bias=V),
    "execute before plan": lambda: planned().execute(),
    "operands of another shape": lambda: planned().reset_operands(a=Q),
    "linalg: None": lambda: linalg.solve(Q, None),
    "linalg: a Future": lambda: linalg.svd(get_client().submit(np.ones, (20, 20))),
    "linalg: a Delayed": lambda: linalg.cg(dask.delayed(np.ones)((20, 20)), V),
    "linalg: a vector in place of a matrix": lambda: linalg.solve(V, V),
    "linalg: a stack where there is none": lambda: linalg.pca(ones(2, 9, 9)),
    "linalg: records": lambda: linalg.solve(da.from_array(np.zeros((20, 20), "i4,f8"), chunks=10), V),
    "linalg: texts": lambda: linalg.solve(da.from_array(np.zeros((20, 20), "U3"), chunks=10), V),
    "linalg: a matrix that is not square": lambda: linalg.solve(A, V),
    "linalg: right-hand sides of another length": lambda: linalg.solve(Q, ones(7)),
    "linalg: a singular matrix": lambda: linalg.solve(Q, V).compute(),
    "linalg: a singular matrix in a stack": lambda: linalg.inv(da.zeros((2, 3, 3))).compute(),
    "linalg: a matrix that is not positive definite": lambda: linalg.cholesky(-Q).compute(),
    "linalg: least squares of columns that depend on each other": lambda: linalg.lstsq(Q, V)[0].compute(),
    "linalg: the same of a tall matrix": lambda: linalg.pinv(ones(200, 5)).compute(),
    "linalg: NaN in pca": lambda: linalg.pca(ones(200, 5) * np.nan)[0].compute(),
    "linalg: NaN in solve": lambda: linalg.solve(Q * np.nan, V).compute(),
    "linalg: a misspelt option": lambda: linalg.cholesky(Q, lowr=True),
    "config: a misspelt method": with_config("method", "suma"),
    "config: a misspelt key": with_config("enabld", True),
    "config: a misspelt key further down": with_config("timeouts.vot", "3s"),
    "config: flops in words": under_enable("minimum-flops", "lots"),
    "config: enabled maybe": with_config("enabled", "maybe"),
    "config: a time in words": with_config("timeouts.vote", "later"),
    "config: hints": with_config("hints", "maybe"),
    "config: exceeded": under_enable("memory.exceeded", "ignore"),
    "config: a share above 1": with_config("memory.limit-fraction", 1.5),
}

# Command lines; {address} is that of a cluster. Files are those of `make_files`.
COMMANDS = [
    "matmul none.npy B.npy --out C.npy",
    "matmul nothing.zarr::a B.npy --out C.npy",
    "matmul none.zarr B.npy --out C.npy",
    "matmul none.h5 B.npy --out C.npy",
    "matmul A B.npy --out C.npy",
    "matmul A.csv B.npy --out C.npy",
    "matmul A.npy A.npy --out C.npy",
    "matmul garbage.npy B.npy --out C.npy",
    "matmul objects.npy B.npy --out C.npy",
    "matmul short.npy B.npy --out C.npy",
    "matmul garbage.h5 B.npy --out C.npy",
    "matmul two.h5 B.npy --out C.npy",
    "matmul two.h5::c B.npy --out C.npy",
    "matmul group.zarr B.npy --out C.npy",
    "matmul group.zarr::none B.npy --out C.npy",
    "matmul whole.zarr::a B.npy --out C.npy",
    "matmul damaged.zarr B.npy --out C.npy --scheduler {address}",
    "matmul texts.npy B.npy --out C.npy",
    "matmul A.npy B.npy --out there.npy",
    "matmul A.npy B.npy --out one.h5::new",
    "matmul A.npy B.npy --out two.h5::a --overwrite",
    "matmul A.npy B.npy --out group.zarr --overwrite",
    "matmul A.npy B.npy --out A.npy --overwrite",
    "matmul A.npy B.npy --out C.npy --c C.npy",
    "matmul A.npy B.npy --out none/C.npy",
    "matmul A.npy B.npy --out s3://bucket/C.zarr",
    "matmul A.npy B.npy --out C.csv",
    "matmul A.npy B.npy --out C.npy --aux-out D.npy",
    "matmul A.npy B.npy --out C.npy --aux-out C.npy --epilog relu_aux",
    "matmul A.npy B.npy --out C.npy --epilog rellu",
    "matmul A.npy B.npy --out C.npy --epilog bias",
    "matmul A.npy B.npy --out C.npy --bias b.npy",
    "matmul A.npy B.npy --out C.npy --aux b.npy",
    "matmul A.npy B.npy --out C.npy --epilog dgelu",
    "matmul A.npy B.npy --out C.npy --beta 2",
    "matmul A.npy B.npy --out C.npy --dtype floatt32",
    "matmul A.npy B.npy --out C.npy --dtype bfloat16 --scheduler {address}",
    "matmul A.npy B.npy --out C.npy --chunks 0",
    "matmul A.npy B.npy --out C.npy --chunks 5,5,5",
    "matmul A.npy B.npy --out C.npy --chunks five",
    "matmul A.npy B.npy --out C.npy --engine cublasmp --scheduler {address}",
    "matmul A.npy B.npy --out C.npy --scheduler 127.0.0.1:1",
    "matmul A.npy B.npy --out C.npy --scheduler nonsense://x",
    "explain A.npy A.npy",
    "explain A.npy B.npy --html none/plan.html",
    "check --scheduler 127.0.0.1:1",
    "bench --size many",
    "demo --size 999999999 --workers 2",
]

# Those whose messages are click's: they differ between its versions.
TO_CLICK = [
    "matmull A.npy B.npy --out C.npy",
    "matmul A.npy --out C.npy",
    "matmul A.npy B.npy",
    "matmul A.npy B.npy --out",
    "matmul A.npy B.npy --out C.npy --no-such-option",
    "matmul A.npy B.npy --out C.npy --op-a X",
    "matmul A.npy B.npy --out C.npy --method suma",
    "matmul A.npy B.npy --out C.npy --workers 0",
    "bench --dtype int8",
    "demo --size 0",
]


def make_files(folder: Path) -> None:
    """Make the files that the command lines name."""
    import h5py
    import zarr

    np.save(folder / "A.npy", np.ones((40, 30)))
    np.save(folder / "B.npy", np.ones((30, 20)))
    np.save(folder / "b.npy", np.ones(20))
    np.save(folder / "there.npy", np.ones(3))
    np.save(folder / "objects.npy", np.array([{}, 1], object))
    np.save(folder / "texts.npy", np.zeros((40, 30), "U3"))
    (folder / "garbage.npy").write_bytes(b"this is text, and no array")
    (folder / "garbage.h5").write_bytes(b"this is text, and no array")
    (folder / "short.npy").write_bytes((folder / "A.npy").read_bytes()[:1000])
    for name, arrays in (("one", "a"), ("two", "ab")):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for each in arrays:
                file[each] = np.ones((40, 30))
    zarr.open_group(str(folder / "group.zarr"), mode="w").create_array("a", data=np.ones((4, 4)))
    zarr.create_array(str(folder / "damaged.zarr"), data=np.random.default_rng(1).random((40, 30)), chunks=(10, 10))
    zarr.create_array(str(folder / "whole.zarr"), data=np.ones((40, 30)), chunks=(10, 10))
    chunk = folder / "damaged.zarr" / "c" / "2" / "1"
    chunk.write_bytes(chunk.read_bytes()[:30])
