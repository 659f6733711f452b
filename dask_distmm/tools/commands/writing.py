"""Results in files: written beside their target, and renamed when complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dask_distmm.errors import DistMMError, PlanError
from dask_distmm.tools.commands.places import Place, datasets, first_line, h5py_for, zarr_for
from dask_distmm.tools.local import interrupts_deferred


def regular(chunks: Sequence[int]) -> int:
    """Return the size of equal chunks like these, of which only the last may be smaller, as stores demand."""
    return max(1, *chunks)


def check_target(place: Place, overwrite: bool) -> None:
    """Make sure that an array can be written to a place."""
    if place.remote:
        raise PlanError(
            f"{place} is a URL, where a result can't be renamed when it is complete; give a path of the file system"
        )
    # Before --overwrite is offered, which would not help then.
    if others := _others(place):
        raise PlanError(f"{place} can't be written: {others}")
    if place.target.exists() and not overwrite:
        raise PlanError(f"{place} exists; --overwrite replaces it")
    check_folder(place, place.file.parent)


def check_folder(what: object, folder: Path) -> None:
    """Make sure that files can be made in a folder."""
    if not folder.is_dir():
        raise PlanError(f"{what} can't be written: there is no folder {folder}; make it, or give another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f"{what} can't be written: the folder {folder} is read-only for you; give another path")


def check_inputs(place: Place, inputs: Sequence[Place]) -> None:
    """Make sure that a result takes the place of none of the arrays that it is made from."""
    for given in inputs:
        if given.remote:
            continue
        ours, theirs = place.target, given.target
        if ours == theirs or ours in theirs.parents or theirs in ours.parents:
            raise PlanError(f"{place} is the input {given} too, which would be lost; give another file for the result")


def check_type(place: Place, dtype: Any) -> None:
    """Make sure that a format has a type; none of them has bfloat16 or FP8."""
    if np.dtype(dtype).kind not in "biufc":
        raise PlanError(f"{place}: the result is of {dtype}, which such files don't have; take another --dtype")


def _others(place: Place) -> str:
    """Return why more than an array would be lost if its place were overwritten; empty if nothing would be."""
    file = place.file
    if place.kind == "zarr" and file.exists():
        zarr = zarr_for(place.path)
        try:
            store = zarr.open(str(file), mode="r")
            found = zarr.open(str(file), path=place.inner or None, mode="r") if place.target.exists() else None
        except Exception as error:  # whatever a damaged store is read as
            return f"{file} is there, and is no Zarr store that can be read ({first_line(error)}); remove it first"
        if isinstance(found, zarr.Group):
            return "a group of arrays is there; name one of its arrays, or remove it first"
        if place.inner and not isinstance(store, zarr.Group):
            return f"{place.path} is an array and can't hold another one; give another store"
    elif place.kind == "hdf5":
        h5py = h5py_for(place.path)
        if file.exists():
            names = datasets(h5py, place)
            if len(names) > 1 or (place.inner and names != [place.inner]):
                return (
                    f"{file} has the datasets {', '.join(names[:5]) or 'none'}, and HDF5 files are replaced as a "
                    "whole; give another file, or remove this one first"
                )
    elif file.is_dir():
        return "it is a folder; give a file"
    return ""


@contextlib.contextmanager
def staged(place: Place, overwrite: bool) -> Iterator[Path]:
    """Give a path to write to; at the end of the block the file takes its place, or vanishes after an error.

    It is in a hidden folder ``.NAME.*.partial`` beside the target. Only a program that is killed leaves that behind.
    """
    check_target(place, overwrite)
    target, home = place.target, place.file.parent
    made: list[Path] = []  # so that it is known here even if Ctrl-C comes while it is made
    try:
        with interrupts_deferred():
            try:
                made.append(Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=home)))
            except OSError as error:
                raise PlanError(
                    f"{place} can't be written: no folder can be made in {home} ({error.strerror}); give another path"
                ) from error
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
    zarr = zarr_for(place.path)
    version = zarr.open_group(str(place.file), mode="r").metadata.zarr_format
    parent = str(Path(place.inner).parent)
    zarr.open_group(str(place.file), path="" if parent == "." else parent, mode="a", zarr_format=version)


def _consolidate(place: Place) -> None:
    """Bring a Zarr store's consolidated metadata up to date, where it has any."""
    zarr = zarr_for(place.path)
    if zarr.open_group(str(place.file), mode="r").metadata.consolidated_metadata is not None:
        zarr.consolidate_metadata(str(place.file))


Write = Callable[[tuple[slice, ...], Any], None]


@contextlib.contextmanager
def writer(
    path: Path, kind: str, inner: str, shape: Sequence[int], chunks: Sequence[int], dtype: Any
) -> Iterator[Write]:
    """Make an array in a new file; give a function that writes parts of it, from this process."""
    if kind == "npy":
        found = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=tuple(shape))
        yield found.__setitem__
        found.flush()
        return
    with h5py_for(str(path)).File(path, "w") as file:
        whole = not shape or 0 in shape
        found = file.create_dataset(inner or "data", shape=shape, dtype=dtype, chunks=None if whole else tuple(chunks))
        yield found.__setitem__


def make_zarr(path: Path, place: Place, shape: Sequence[int], chunks: Sequence[int], dtype: Any) -> Any:
    """Return a new Zarr array for the workers to write, at a path of `staged`."""
    zarr = zarr_for(place.path)
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
        raise DistMMError(f"Zarr can't store this result: {first_line(error)}") from error
