"""Arrays in files: Zarr, NumPy's .npy, HDF5. Read lazily by the workers; written beside and renamed when complete."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np

from dask_distmm.errors import DistMMError
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.tools.local import chunk_rows, interrupts_deferred

__all__ = ["Place", "make_zarr", "parse_place", "read", "regular", "staged", "writer"]

_KINDS = {".zarr": "zarr", ".npy": "npy", ".h5": "hdf5", ".hdf5": "hdf5"}
_HOW = "X.zarr, X.zarr::path/of/array, X.npy or X.h5::dataset"
# What one chunk along batch axes should hold.
_BATCH_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array is.

    Parameters
    ----------
    path
        File, folder or, for Zarr to be read, URL.
    inner
        Path inside it; empty for none.
    kind
        ``"zarr"``, ``"npy"`` or ``"hdf5"``.
    given
        As the user has named it.
    """

    path: str
    inner: str
    kind: str
    given: str = dataclasses.field(compare=False)

    @property
    def remote(self) -> bool:
        """Whether it is a URL."""
        return "://" in self.path

    @property
    def file(self) -> Path:
        """Its absolute path on this machine, links followed."""
        return Path(self.path).resolve()

    @property
    def target(self) -> Path:
        """What comes into being when an array is written here: a file, a store, an array in a store that is there."""
        return self.file / self.inner if self.kind == "zarr" and self.inner and self.file.exists() else self.file

    def __str__(self) -> str:
        return self.given


def parse_place(text: str) -> Place:
    """Return the place that a user names, as ``path`` or ``path::inner``.

    Raises
    ------
    DistMMError
        The name does not say which format it is.
    """
    path, _, inner = text.partition("::")
    kind = _KINDS.get(Path(path).suffix.lower())
    if kind is None and path and Path(path).is_dir():
        kind = "zarr"
    if kind is None or (kind == "npy" and inner):
        raise DistMMError(f"{text}: expected {_HOW}")
    return Place(path if "://" in path else str(Path(path).absolute()), inner.strip("/"), kind, text)


# Reading


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
        with _h5py(path).File(path, "r") as file:
            found = file[name]
            self.shape, self.dtype, self.ndim, self.chunks = found.shape, found.dtype, found.ndim, found.chunks

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        with _h5py(self.path).File(self.path, "r") as file:
            return np.asarray(file[self.name][index])


def _h5py(path: str) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise DistMMError(f"{path}: HDF5 needs h5py ({error}), here and on the workers: pip install h5py") from error
    return h5py


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
        raise DistMMError(f"{place}: can't be read: {_first_line(error)}") from error
    stored = getattr(source, "shards", None) or getattr(source, "chunks", None)
    chunks = read_chunks(source.shape, source.dtype.itemsize, stored, workers)
    # Its own name: what a file of this name held yesterday may still be on the cluster.
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
    h5py = _h5py(place.path)
    names = _datasets(h5py, place)
    if not place.inner and len(names) == 1:
        return Hdf5Dataset(place.path, names[0])
    if place.inner not in names:
        file = place.given.partition("::")[0]
        known = ", ".join(f"{file}::{name}" for name in names[:5]) + ", ..." * (len(names) > 5)
        raise DistMMError(f"{place} is no dataset; name one: {known or 'there is none'}")
    return Hdf5Dataset(place.path, place.inner)


def _datasets(h5py: Any, place: Place) -> list[str]:
    names: list[str] = []
    with h5py.File(place.path, "r") as file:
        file.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
    return names


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


# Writing


def regular(chunks: Sequence[int]) -> int:
    """Return the size of equal chunks like these, of which only the last may be smaller; stores want such."""
    return max(1, *chunks)


def check_target(place: Place, overwrite: bool) -> None:
    """Make sure that an array can be written to a place.

    Raises
    ------
    DistMMError
        It is not on this machine's file system, is there already, or can't be written.
    """
    if place.remote:
        raise DistMMError(f"{place}: results go to a path of the file system: a URL can't be renamed when complete")
    others = _others(place)
    if place.target.exists() and not overwrite:
        raise DistMMError(f"{place} exists; --overwrite replaces it")
    if others:
        raise DistMMError(f"{place} is not overwritten: {others}")
    folder = place.file.parent
    if not folder.is_dir():
        raise DistMMError(f"{place}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DistMMError(f"{place}: the folder {folder} can't be written to")


def check_type(place: Place, dtype: Any) -> None:
    """Make sure that a format has a type; none of them has bfloat16 or FP8.

    Raises
    ------
    DistMMError
        It has not.
    """
    if np.dtype(dtype).kind not in "biufc":
        raise DistMMError(f"{place}: the result is of {dtype}, which such files don't have; take another --dtype")


def _others(place: Place) -> str:
    """Return what would be lost beside an array if what is at a place were replaced; empty for nothing."""
    file = place.file
    if place.kind == "zarr" and file.exists():
        import zarr

        try:
            store = zarr.open(str(file), mode="r")
            found = zarr.open(str(file), path=place.inner or None, mode="r") if place.target.exists() else None
        except Exception as error:  # whatever a damaged store is read as
            return f"it is no Zarr store that can be read ({_first_line(error)}); remove it first"
        if isinstance(found, zarr.Group):
            return "it is a group; name one of its arrays, or remove it first"
        if place.inner and not isinstance(store, zarr.Group):
            return f"{place.path} is an array and can't hold another one"
    elif place.kind == "hdf5":
        h5py = _h5py(place.path)
        if file.exists():
            names = _datasets(h5py, place)
            if len(names) > 1 or (place.inner and names != [place.inner]):
                return f"it has the datasets {', '.join(names[:5])}, and HDF5 files are replaced as a whole"
    elif file.is_dir():
        return "it is a folder"
    return ""


@contextlib.contextmanager
def staged(place: Place, overwrite: bool) -> Iterator[Path]:
    """Give a path to write to; at the end of the block what is there takes its place, or vanishes after an error.

    It is in a hidden folder ``.NAME.*.partial`` beside the target. Only a program that is killed leaves that behind.

    Raises
    ------
    DistMMError
        As `check_target`; and if the target has come into being meanwhile.
    """
    check_target(place, overwrite)
    target, home = place.target, place.file.parent
    made: list[Path] = []  # so that it is known here even if Ctrl-C comes while it is made
    try:
        with interrupts_deferred():
            made.append(Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=home)))
        folder = made[0]
        # As open as the target's folder: workers may be other users.
        folder.chmod(stat.S_IMODE(home.stat().st_mode) | stat.S_IRWXU)
        yield folder / target.name
        with interrupts_deferred():
            check_target(place, overwrite)
            if target.is_dir():
                target.rename(folder / "replaced")
            if target != place.file:
                _make_group(place)
            (folder / target.name).replace(target)
            if target != place.file:
                _consolidate(place)
    finally:
        with interrupts_deferred():
            for path in made:
                shutil.rmtree(path, ignore_errors=True)


def _make_group(place: Place) -> None:
    """Make the groups that an array in a Zarr store is to be in, as far as they are missing."""
    import zarr

    version = zarr.open_group(str(place.file), mode="r").metadata.zarr_format
    parent = str(Path(place.inner).parent)
    zarr.open_group(str(place.file), path="" if parent == "." else parent, mode="a", zarr_format=version)


def _consolidate(place: Place) -> None:
    """Bring a Zarr store's consolidated metadata up to date, where it has such."""
    import zarr

    if zarr.open_group(str(place.file), mode="r").metadata.consolidated_metadata is not None:
        zarr.consolidate_metadata(str(place.file))


Write = Callable[[tuple[slice, ...], Any], None]


@contextlib.contextmanager
def writer(
    path: Path, kind: str, inner: str, shape: Sequence[int], chunks: Sequence[int], dtype: Any
) -> Iterator[Write]:
    """Make an array in a new file; give a function that writes parts of it, from this process.

    Parameters
    ----------
    path, kind, inner
        As of a `Place`.
    shape, chunks, dtype
        Of the array.
    """
    if kind == "npy":
        found = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=tuple(shape))
        yield found.__setitem__
        found.flush()
        return
    with _h5py(str(path)).File(path, "w") as file:
        whole = not shape or 0 in shape
        found = file.create_dataset(inner or "data", shape=shape, dtype=dtype, chunks=None if whole else tuple(chunks))
        yield found.__setitem__


def make_zarr(path: Path, place: Place, shape: Sequence[int], chunks: Sequence[int], dtype: Any) -> Any:
    """Return a new Zarr array for the workers to write, at a path of `staged`."""
    import zarr

    inside = place.target != place.file
    version = zarr.open_group(str(place.file), mode="r").metadata.zarr_format if inside else 3
    try:
        if place.inner and not inside:
            zarr.open_group(str(path), mode="w")
        return zarr.create_array(
            str(path),
            name=None if inside else place.inner or None,
            shape=tuple(shape),
            chunks=tuple(max(1, size) for size in chunks),
            dtype=dtype,
            zarr_format=version,
        )
    except ValueError as error:
        raise DistMMError(f"Zarr can't store this result: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
