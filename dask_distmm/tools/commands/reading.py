"""Arrays in files as lazy Dask arrays: the workers read them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np

from dask_distmm.errors import DistMMError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.tools.commands.places import Place, datasets, first_line, h5py_for
from dask_distmm.tools.local import chunk_rows

__all__ = ["Hdf5Dataset", "NpyFile", "read", "read_chunks"]

# One chunk along batch axes should hold so many bytes.
_BATCH_BYTES = 64 * 2**20


class NpyFile:
    """An .npy file, opened wherever a part of it is wanted.

    Parameters
    ----------
    path
        Of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        found = np.load(path, mmap_mode="r")
        self.shape, self.dtype, self.ndim = found.shape, found.dtype, found.ndim

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        return np.array(np.load(self.path, mmap_mode="r")[index])


class Hdf5Dataset:
    """A dataset in an HDF5 file, opened wherever a part of it is wanted.

    Parameters
    ----------
    path, name
        Of the file, and of the dataset in it.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        with h5py_for(path).File(path, "r") as file:
            found = file[name]
            self.shape, self.dtype, self.ndim, self.chunks = found.shape, found.dtype, found.ndim, found.chunks

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        with h5py_for(self.path).File(self.path, "r") as file:
            return np.asarray(file[self.name][index])


def read(place: Place, workers: int, dtype: str | None = None) -> da.Array:
    """Return the array at a place. Lazy: the workers read it.

    Parameters
    ----------
    place
        Where it is.
    workers
        How many there are: each should get some chunks.
    dtype
        Type to convert to, as it is read.

    Raises
    ------
    DistMMError
        There is no such array, or it can't be read.
    """
    try:
        source = {"zarr": _open_zarr, "npy": _open_npy, "hdf5": _open_hdf5}[place.kind](place)
    except DistMMError:
        raise
    except Exception as error:  # each format has errors of its own
        raise DistMMError(f"{place}: can't be read: {first_line(error)}") from error
    stored = getattr(source, "shards", None) or getattr(source, "chunks", None)
    chunks = read_chunks(source.shape, source.dtype.itemsize, stored, workers)
    # A name of its own: chunks of an older file of the same name may still be on the cluster.
    name = f"read-{secrets.token_hex(8)}"
    if place.kind == "zarr":
        array = da.from_zarr(source, chunks=chunks, name=name)
    else:
        meta = np.empty((0,) * source.ndim, source.dtype)
        array = da.from_array(source, chunks=chunks, name=name, lock=False, asarray=True, fancy=False, meta=meta)
    if dtype is None:
        return array
    try:
        found = dtype_from_name(dtype)
    except TypeError as error:
        raise DistMMError(f"--dtype {dtype}: there is no such type; take one as float32 or complex128") from error
    return array if array.dtype == found else array.astype(found)


def _open_zarr(place: Place) -> Any:
    import zarr

    if not place.remote and not place.file.exists():
        raise DistMMError(f"{place}: there is no such store")
    node = zarr.open(place.path, path=place.inner or None, mode="r")
    if isinstance(node, zarr.Array):
        return node
    members = node.members(max_depth=None)
    sign = "/" if place.inner else "::"
    found = [f"{place}{sign}{name}" for name, member in members if isinstance(member, zarr.Array)]
    known = ", ".join(found[:5]) + ", ..." * (len(found) > 5)
    raise DistMMError(f"{place} is a group; name one of its arrays: {known or 'it has none'}")


def _open_npy(place: Place) -> NpyFile:
    return NpyFile(place.path)


def _open_hdf5(place: Place) -> Hdf5Dataset:
    h5py = h5py_for(place.path)
    names = datasets(h5py, place)
    if not place.inner and len(names) == 1:
        return Hdf5Dataset(place.path, names[0])
    if place.inner not in names:
        file = place.given.partition("::")[0]
        known = ", ".join(f"{file}::{name}" for name in names[:5]) + ", ..." * (len(names) > 5)
        raise DistMMError(f"{place} is no dataset; name one: {known or 'there is none'}")
    return Hdf5Dataset(place.path, place.inner)


def read_chunks(
    shape: Sequence[int], itemsize: int, stored: Sequence[int] | None, workers: int
) -> tuple[tuple[int, ...], ...]:
    """Return the chunks to read an array in: some for each worker, made of whole chunks of the store.

    Parameters
    ----------
    shape, itemsize
        Of the array.
    stored
        Chunks of the store, None where it has none.
    workers
        Number of workers.
    """
    most = max(1, _BATCH_BYTES // max(1, itemsize * int(np.prod(shape[-2:]))))
    chunks = []
    for axis, length in enumerate(shape):
        # The last two are rows and columns; those before are of a batch.
        target = max(1, chunk_rows(length, workers)) if axis >= len(shape) - 2 else most
        if stored is not None:
            # Part of a stored chunk can't be read without reading all of it.
            target = stored[axis] * max(1, target // stored[axis])
        full, rest = divmod(length, target)
        chunks.append((target,) * full + (rest,) * (rest > 0) or (0,))
    return tuple(chunks)
