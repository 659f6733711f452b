"""Where arrays in files are: Zarr, NumPy's .npy, HDF5."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dask_distmm.errors import PlanError
from dask_distmm.installing import library_of

_KINDS = {".zarr": "zarr", ".npy": "npy", ".h5": "hdf5", ".hdf5": "hdf5"}
_HOW = "X.zarr, X.zarr::path/of/array, X.npy or X.h5::dataset"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array is."""

    # File, folder or, for Zarr to be read, URL.
    path: str
    # Path inside it; empty for none.
    inner: str
    # ``"zarr"``, ``"npy"`` or ``"hdf5"``.
    kind: str
    # As the user has named it.
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
        """The path that writing an array makes: a file, a store, or an array in a store that is there."""
        return self.file / self.inner if self.kind == "zarr" and self.inner and self.file.exists() else self.file

    def __str__(self) -> str:
        return self.given


def parse_place(text: str) -> Place:
    """Return the place that a user names, as ``path`` or ``path::inner``."""
    path, _, inner = text.partition("::")
    kind = _KINDS.get(Path(path).suffix.lower())
    if kind is None and path and Path(path).is_dir():
        kind = "zarr"
    if kind is None or (kind == "npy" and inner):
        raise PlanError(f"{text!r} names no format; expected {_HOW}")
    return Place(path if "://" in path else str(Path(path).absolute()), inner.strip("/"), kind, text)


def h5py_for(path: str) -> Any:
    """Return the module h5py, which a file needs."""
    return _library("h5py", path)


def zarr_for(path: str) -> Any:
    """Return the module zarr, which a store needs."""
    return _library("zarr", path)


def _library(name: str, path: str) -> Any:
    """Return a module of the extra "files"."""
    return library_of("files", name, path, ", here and on the workers")


def datasets(h5py: Any, place: Place) -> list[str]:
    """Return the names of all datasets in an HDF5 file."""
    names: list[str] = []
    if not place.file.is_file():
        raise PlanError(f"{place}: there is no file {place.path}")
    if not h5py.is_hdf5(place.path):
        raise PlanError(f"{place}: {place.path} is no HDF5 file, or it is damaged; write it anew")
    with h5py.File(place.path, "r") as file:
        file.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
    return names


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
