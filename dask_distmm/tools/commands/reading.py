"""Arrays in files as lazy Dask arrays: the workers read them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np

from dask_distmm.errors import DistMMError, PlanError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.tools.commands.places import Place, datasets, first_line, h5py_for, zarr_for
from dask_distmm.tools.local import chunk_rows

# One chunk along batch axes should hold so many bytes.
_BATCH_BYTES = 64 * 2**20


class FileArray:
    """An array in a file, opened wherever a part of it is wanted."""

    def __init__(self, place: Place) -> None:
        self.place = place
        found = self.opened()
        self.shape, self.dtype, self.ndim = tuple(found.shape), np.dtype(found.dtype), int(found.ndim)

    @property
    def stored(self) -> tuple[int, ...] | None:
        """Chunk sizes of the file; None where it has none."""
        return None

    def opened(self) -> Any:
        """Return the file's array, which reads what is indexed."""
        raise NotImplementedError

    def part(self, index: Any) -> np.ndarray[Any, Any]:
        """Return some of the array, as NumPy's."""
        return np.array(self.opened()[index])

    def damaged(self, index: Any) -> str:
        """Return which part of the file can't be read; empty where that is not known."""
        return ""

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        try:
            return self.part(index)
        except DistMMError:
            raise
        except Exception as error:  # each format has errors of its own
            where = self.damaged(index) or f"{self.place}, the part {_index_text(index)}"
            raise DistMMError(f"{where} can't be read: {first_line(error)}; write it anew") from error


class NpyFile(FileArray):
    """An .npy file."""

    def opened(self) -> Any:
        """Return the file, mapped into memory."""
        if not self.place.file.is_file():
            raise PlanError(f"{self.place}: there is no file {self.place.path}")
        try:
            return np.load(self.place.path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise PlanError(f"{self.place}: {self._why_not(first_line(error))}") from error

    def _why_not(self, reason: str) -> str:
        """Return why the file can't be mapped; NumPy would have one load it in an unsafe way."""
        with open(self.place.path, "rb") as file:
            start = file.read(len(np.lib.format.MAGIC_PREFIX))
        if start != np.lib.format.MAGIC_PREFIX:
            return f"it is no .npy file: it begins with {start!r}; write the array by numpy.save"
        if "object" in reason:
            return "it holds Python objects; expected numbers: convert the array before numpy.save"
        return f"it is damaged or cut off ({reason}); write it anew by numpy.save"


class Hdf5Dataset(FileArray):
    """A dataset in an HDF5 file."""

    def __init__(self, place: Place, name: str) -> None:
        self.name = name
        with h5py_for(place.path).File(place.path, "r") as file:
            found = file[name]
            self.place, self._stored = place, found.chunks
            self.shape, self.dtype, self.ndim = found.shape, found.dtype, found.ndim

    @property
    def stored(self) -> tuple[int, ...] | None:
        """Chunk sizes of the dataset."""
        return None if self._stored is None else tuple(self._stored)

    def part(self, index: Any) -> np.ndarray[Any, Any]:
        """Return some of the dataset."""
        with h5py_for(self.place.path).File(self.place.path, "r") as file:
            return np.asarray(file[self.name][index])


class ZarrArray(FileArray):
    """An array of a Zarr store."""

    def __init__(self, place: Place, array: Any) -> None:
        self._array = array
        super().__init__(place)

    @property
    def stored(self) -> tuple[int, ...] | None:
        """The sizes of a part that is read at once: of a shard where the array has some, else of a chunk."""
        found: tuple[int, ...] = self._array.shards or self._array.chunks
        return found

    def opened(self) -> Any:
        """Return the array as Zarr has it."""
        return self._array

    def damaged(self, index: Any) -> str:
        """Return the file of the first stored chunk that can't be read."""
        sizes = self.stored or ()
        parts = index if isinstance(index, tuple) else (index,)
        ranges = [slice(*part.indices(n)) for part, n in zip(parts, self.shape, strict=True)]
        numbers = [range(part.start // size, -(-part.stop // size)) for part, size in zip(ranges, sizes, strict=True)]
        for at in itertools.product(*numbers):
            try:
                self._array[tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, sizes, strict=True))]
            except Exception:
                return f"{self.place}: the chunk {self._array.metadata.encode_chunk_key(at)}"
        return ""


def _index_text(index: Any) -> str:
    """Return an index as one writes it."""
    parts = index if isinstance(index, tuple) else (index,)
    return f"[{', '.join(f'{x.start}:{x.stop}' if isinstance(x, slice) else str(x) for x in parts)}]"


def read(place: Place, workers: int, dtype: str | None = None) -> da.Array:
    """Return the array at a place. Lazy: the workers read it."""
    try:
        source: FileArray = {"zarr": _open_zarr, "npy": NpyFile, "hdf5": _open_hdf5}[place.kind](place)
    except DistMMError:
        raise
    except Exception as error:  # each format has errors of its own
        raise PlanError(f"{place} can't be read: {first_line(error)}") from error
    chunks = read_chunks(source.shape, source.dtype.itemsize, source.stored, workers)
    # A name of its own: chunks of an older file of the same name may still be on the cluster.
    name = f"read-{secrets.token_hex(8)}"
    meta = np.empty((0,) * source.ndim, source.dtype)
    array = da.from_array(source, chunks=chunks, name=name, lock=False, asarray=True, fancy=False, meta=meta)
    if dtype is None:
        return array
    try:
        found = dtype_from_name(dtype)
    except TypeError as error:
        raise PlanError(f"--dtype {dtype}: there is no such type; take one as float32 or complex128") from error
    return array if array.dtype == found else array.astype(found)


def _open_zarr(place: Place) -> ZarrArray:
    zarr = zarr_for(place.path)
    if not place.remote and not place.file.exists():
        raise PlanError(f"{place}: there is no store {place.path}")
    try:
        node = zarr.open(place.path, path=place.inner or None, mode="r")
    except FileNotFoundError:
        if not place.inner:
            raise
        root = zarr.open(place.path, mode="r")
        if isinstance(root, zarr.Array):
            raise PlanError(f"{place}: {place.path} is an array and has no others; leave ::{place.inner} out") from None
        known = _arrays(zarr, root, f"{place.given.partition('::')[0]}::")
        raise PlanError(f"{place}: there is no such array; name one: {known}") from None
    if isinstance(node, zarr.Array):
        return ZarrArray(place, node)
    known = _arrays(zarr, node, f"{place}{'/' if place.inner else '::'}")
    raise PlanError(f"{place} is a group; name one of its arrays: {known}")


def _arrays(zarr: Any, group: Any, prefix: str) -> str:
    """Return the names of some arrays in a group."""
    found = [f"{prefix}{name}" for name, member in group.members(max_depth=None) if isinstance(member, zarr.Array)]
    return ", ".join(sorted(found)[:5]) + ", ..." * (len(found) > 5) or "it has none"


def _open_hdf5(place: Place) -> Hdf5Dataset:
    h5py = h5py_for(place.path)
    names = datasets(h5py, place)
    if not place.inner and len(names) == 1:
        return Hdf5Dataset(place, names[0])
    if place.inner not in names:
        file = place.given.partition("::")[0]
        known = ", ".join(f"{file}::{name}" for name in names[:5]) + ", ..." * (len(names) > 5)
        raise PlanError(f"{place} is no dataset; name one: {known or 'there is none'}")
    return Hdf5Dataset(place, place.inner)


def read_chunks(
    shape: Sequence[int], itemsize: int, stored: Sequence[int] | None, workers: int
) -> tuple[tuple[int, ...], ...]:
    """Return the chunks to read an array in: some for each worker, made of whole chunks of the store."""
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
