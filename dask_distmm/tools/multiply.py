"""``dask distmm matmul`` and ``dask distmm explain``: products of arrays in files.

Arrays in Zarr stores, .npy and HDF5 files: read lazily by the workers; written beside their place, then renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import dask
import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from dask.utils import format_bytes, format_time
from distributed import Client, wait

from dask_distmm import Explanation, Plan, explain, matmul, progress
from dask_distmm.compat import library_of
from dask_distmm.errors import DistMMError, PlanError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.waves import WavePlan
from dask_distmm.tools.local import chunk_rows, computed, connected, default_workers, undisturbed

# Arrays in Zarr stores, .npy and HDF5 files: read lazily by the workers; written beside their place, then renamed


_KINDS = {".zarr": "zarr", ".npy": "npy", ".h5": "hdf5", ".hdf5": "hdf5"}
# One chunk along batch axes should hold this many bytes.
_BATCH_BYTES = 64 * 2**20
# After an error workers may take this long to end the tasks that write (seconds).
_STOP_SECONDS = 20.0

Sizes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array is."""

    # File, folder or, for Zarr to be read, URL; and the path inside of it, empty for none.
    path: str
    inner: str
    # "zarr", "npy" or "hdf5".
    kind: str
    # As the user has named it.
    text: str = dataclasses.field(compare=False)

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
        return self.text


def parse_place(text: str) -> Place:
    """Return the place that a user names, as ``path`` or ``path::inner``."""
    path, _, inner = text.partition("::")
    kind = _KINDS.get(Path(path).suffix.lower())
    if kind is None and path and Path(path).is_dir():
        kind = "zarr"
    if kind is None or (kind == "npy" and inner):
        expected = "X.zarr, X.zarr::path/of/array, X.npy or X.h5::dataset"
        raise PlanError(f"{text!r} does not name a format; expected {expected}")
    return Place(path if "://" in path else str(Path(path).absolute()), inner.strip("/"), kind, text)


def _library(name: str, path: str) -> Any:
    return library_of("files", name, path, ", here and on the workers")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# Reading


def _read_part(place: Place, block_info: Any = None) -> Any:
    """Return the part of an array in a file that is a chunk; the file is opened for it."""
    where = block_info[None]["array-location"]
    try:
        with opened(place) as data:
            return np.array(data[tuple(slice(*part) for part in where)])
    except DistMMError:
        raise
    except Exception as error:  # each format has errors of its own
        part = ", ".join(f"{start}:{stop}" for start, stop in where)
        message = f"{place}, the part [{part}] can't be read: {first_line(error)}; write it anew"
        raise DistMMError(message) from error


@contextlib.contextmanager
def opened(place: Place) -> Iterator[Any]:
    """Give the array at a place, which reads what is indexed."""
    library = _library({"zarr": "zarr", "npy": "numpy", "hdf5": "h5py"}[place.kind], place.path)
    if not place.remote and not place.file.exists():
        raise PlanError(f"{place}: there is no {'store' if place.kind == 'zarr' else 'file'} {place.path}")
    if place.kind == "npy":
        yield _mapped(place)
    elif place.kind == "zarr":
        yield _zarr_array(library, place)
    else:
        names = _datasets(place)
        name = names[0] if not place.inner and len(names) == 1 else place.inner
        if name not in names:
            datasets = _some([f"{place.text.partition('::')[0]}::{name}" for name in names])
            raise PlanError(f"{place} is not a dataset; name one: {datasets}")
        with library.File(place.path, "r") as file:
            yield file[name]


def _mapped(place: Place) -> Any:
    try:
        return np.load(place.path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        with open(place.path, "rb") as file:
            named = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        if not named:
            raise PlanError(f"{place} is not an .npy file; write the array by numpy.save") from error
        # NumPy would have one load it in an unsafe way.
        reason = "it holds Python objects, not numbers" if "object" in str(error) else f"damaged ({first_line(error)})"
        raise PlanError(f"{place} can't be read: {reason}; write it anew by numpy.save") from error


def _zarr_array(zarr: Any, place: Place) -> Any:
    root = zarr.open(place.path, mode="r")
    node = root
    if place.inner:
        if isinstance(root, zarr.Array):
            raise PlanError(f"{place}: {place.path} is an array and has no others; leave ::{place.inner} out")
        node = root.get(place.inner)
    if isinstance(node, zarr.Array):
        return node
    file, members = place.text.partition("::")[0], root.members(max_depth=None)
    arrays = sorted(f"{file}::{name}" for name, member in members if isinstance(member, zarr.Array))
    what = "there is no such array" if node is None else "this is a group"
    raise PlanError(f"{place}: {what}; name one of its arrays: {_some(arrays)}")


def _datasets(place: Place) -> list[str]:
    """Return the names of all datasets in an HDF5 file."""
    h5py, names = _library("h5py", place.path), list[str]()
    if not h5py.is_hdf5(place.path):
        raise PlanError(f"{place}: {place.path} is not an HDF5 file, or it is damaged; write it anew")
    with h5py.File(place.path, "r") as file:
        file.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
    return names


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5) or "it has none"


def read(place: Place, workers: int, dtype: str | None = None) -> da.Array:
    """Return the array at a place. Lazy: the workers read it."""
    try:
        with opened(place) as data:
            shape, kind = tuple(data.shape), np.dtype(data.dtype)
            # Shape of the part that is read at once: a shard or a chunk; None in an .npy file.
            stored = getattr(data, "shards", None) or getattr(data, "chunks", None)
    except DistMMError:
        raise
    except Exception as error:  # each format has errors of its own
        raise PlanError(f"{place} can't be read: {first_line(error)}") from error
    # A name of its own: chunks of an older file of the same name may still be on the cluster.
    settings = {"name": f"read-{secrets.token_hex(8)}", "dtype": kind, "meta": np.empty((0,) * len(shape), kind)}
    array = da.map_blocks(_read_part, place, chunks=read_chunks(shape, kind.itemsize, stored, workers), **settings)
    if dtype is None:
        return array
    try:
        wanted = dtype_from_name(dtype)
    except TypeError as error:
        message = f"--dtype {dtype}: there is no such type; expected, for example, float32 or complex128"
        raise PlanError(message) from error
    return array.astype(wanted, copy=False)


def read_chunks(shape: Sequence[int], itemsize: int, stored: Sequence[int] | None, workers: int) -> Sizes:
    """Return the chunks to read an array in: some for each worker, made of whole chunks of the store."""
    most = max(1, _BATCH_BYTES // max(1, itemsize * int(np.prod(shape[-2:]))))
    targets = []
    for axis, length in enumerate(shape):
        # The last two are rows and columns; those before are of a batch.
        target = max(1, chunk_rows(length, workers)) if axis >= len(shape) - 2 else most
        # Part of a stored chunk can't be read without reading all of it.
        targets.append(target if stored is None else stored[axis] * max(1, target // stored[axis]))
    return cast(Sizes, normalize_chunks(tuple(targets), tuple(shape)))


# Writing


def check_target(place: Place, overwrite: bool) -> None:
    """Make sure that an array can be written to a place."""
    if place.remote:
        message = f"{place} is a URL, where a result can't be renamed when it is complete; pass a path on a file system"
        raise PlanError(message)
    # Before --overwrite is offered, which would not help then.
    if obstacle := _others(place):
        raise PlanError(f"{place} can't be written: {obstacle}")
    if place.target.exists() and not overwrite:
        raise PlanError(f"{place} exists; --overwrite replaces it")
    check_folder(place, place.file.parent)


def check_folder(what: object, folder: Path) -> None:
    """Make sure that files can be made in a folder."""
    if not folder.is_dir():
        raise PlanError(f"{what} can't be written: folder {folder} does not exist; make it, or pass another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f"{what} can't be written: the folder {folder} is read-only for you; pass another path")


def check_inputs(place: Place, inputs: Sequence[Place]) -> None:
    """Make sure that a result takes the place of none of the arrays that it is made from."""
    ours = place.target
    for source in inputs:
        theirs = source.target
        if not source.remote and (ours == theirs or ours in theirs.parents or theirs in ours.parents):
            raise PlanError(f"{place} is the input {source} too, which would be lost; pass another file for the result")


def check_type(place: Place, dtype: Any) -> None:
    """Make sure that a format has a type; none of them has bfloat16 or FP8."""
    if np.dtype(dtype).kind not in "biufc":
        raise PlanError(f"{place}: the result is of {dtype}, which such files don't have; pass another --dtype")


def _others(place: Place) -> str:
    """Return why more than an array would be lost if its place were overwritten; empty if nothing would be."""
    file = place.file
    if place.kind == "zarr" and file.exists():
        zarr = _library("zarr", place.path)
        try:
            store = zarr.open(str(file), mode="r")
            array = zarr.open(str(file), path=place.inner or None, mode="r") if place.target.exists() else None
        except Exception as error:  # whatever a damaged store is read as
            return f"{file} is there, and is not a Zarr store that can be read ({first_line(error)}); remove it first"
        if isinstance(array, zarr.Group):
            return "a group of arrays is there; name one of its arrays, or remove it first"
        if place.inner and not isinstance(store, zarr.Group):
            return f"{place.path} is an array and can't hold another one; pass another store"
    elif place.kind == "hdf5" and file.exists():
        names = _datasets(place)
        if len(names) > 1 or (place.inner and names != [place.inner]):
            has = f"{file} has the datasets {_some(names)}, and HDF5 files are replaced as a whole"
            return f"{has}; pass another file, or remove this one first"
    elif place.kind == "npy" and file.is_dir():
        return "it is a folder; pass a file"
    return ""


@contextlib.contextmanager
def staged(place: Place, overwrite: bool) -> Iterator[Path]:
    """Give a path to write to; at the end of the block the file takes its place, or vanishes after an error.

    It is in a hidden folder ``.NAME.*.partial`` beside the target. Only a program that is killed leaves that behind.
    """
    check_target(place, overwrite)
    target, home = place.target, place.file.parent
    inside = target != place.file
    prefix, suffix = f".{target.name}.", ".partial"
    temporary = tempfile.TemporaryDirectory(prefix=prefix, suffix=suffix, dir=home, ignore_cleanup_errors=True)
    try:
        folder = Path(temporary.name)
        # As open as the target's folder: workers may be other users.
        folder.chmod(stat.S_IMODE(home.stat().st_mode) | stat.S_IRWXU)
        yield folder / target.name
        check_target(place, overwrite)
        if target.is_dir():
            target.rename(folder / "replaced")
        if inside:
            # The groups that the array is to be in.
            zarr, parent = _library("zarr", place.path), str(Path(place.inner).parent)
            store = zarr.open_group(str(place.file), mode="r")
            path = "" if parent == "." else parent
            zarr.open_group(str(place.file), path=path, mode="a", zarr_format=store.metadata.zarr_format)
        (folder / target.name).replace(target)
        if inside and store.metadata.consolidated_metadata is not None:
            zarr.consolidate_metadata(str(place.file))
    finally:
        with undisturbed():
            temporary.cleanup()


def write(client: Client, array: da.Array, path: Path, place: Place) -> None:
    """Write an array of equal chunks, which is in the cluster's memory, to a path of `staged`."""
    array = array.to_backend("numpy")
    if place.kind == "zarr":
        _by_workers(client, _to_zarr(path, place, array))
        return
    # Here, one after the other: a file that several hosts write to at once need not be whole on all file systems.
    with _file(path, place, array) as file:
        for region, key in zip(da.core.slices_from_chunks(array.chunks), np.ndindex(*array.numblocks), strict=True):
            file[region] = array.blocks[key].compute()


@contextlib.contextmanager
def _file(path: Path, place: Place, array: da.Array) -> Iterator[Any]:
    if place.kind == "npy":
        file = np.lib.format.open_memmap(path, mode="w+", dtype=array.dtype, shape=array.shape)
        yield file
        file.flush()
        return
    chunks = array.chunksize if array.ndim and array.size else None
    with _library("h5py", place.path).File(path, "w") as file:
        yield file.create_dataset(place.inner or "data", shape=array.shape, dtype=array.dtype, chunks=chunks)


def _to_zarr(path: Path, place: Place, array: da.Array) -> Any:
    """Return what writes an array to a new Zarr array, at a path of `staged`."""
    zarr, inside = _library("zarr", place.path), place.target != place.file
    version = zarr.open_group(str(place.file), mode="r").metadata.zarr_format if inside else 3
    if place.inner and not inside:
        zarr.open_group(str(path), mode="w")
    try:
        return array.to_zarr(
            str(path), component=None if inside else place.inner or None, compute=False, zarr_format=version
        )
    except ValueError as error:
        raise DistMMError(f"Zarr can't store this result: {first_line(error)}") from error


def _by_workers(client: Client, stored: Any) -> None:
    """Write from the workers; after an error or Ctrl-C wait for the tasks that write, whose files are then removed."""
    with undisturbed():
        done = client.compute(stored)
    try:
        done.result()
    except BaseException:
        deadline = time.monotonic() + _STOP_SECONDS
        with undisturbed(), contextlib.suppress(Exception):
            done.cancel()
            # Tasks that the scheduler has sent before it heard of the end arrive before these.
            wait([client.submit(int, workers=[worker], pure=False) for worker in client.nthreads()], _STOP_SECONDS)
            while any(client.run(_running).values()) and time.monotonic() < deadline:
                time.sleep(0.05)
        raise


def _running(dask_worker: Any) -> int:
    """Return how many tasks a worker runs, also of those that were cancelled."""
    return len(dask_worker.state.all_running_tasks)


# ``dask distmm matmul`` and ``dask distmm explain``: products of arrays in files


Say = Callable[[str], None]


# A product of arrays in files, as a user asks for it on the command line: A, B and C, the inputs of the epilog,
# arguments of `matmul`, where results go and what computes them, by the names of the options.
Asked = Mapping[str, Any]


def places(options: Asked) -> list[Place]:
    """Return where the inputs are."""
    return [parse_place(text) for name in ("a", "b", "c", "bias", "aux") if (text := options[name]) is not None]


def kept(options: Asked) -> str:
    """Return the name of the epilog's auxiliary output; empty for none."""
    formula = Formula(epilog=options["epilog"] or "")
    return formula.saved or formula.sums or formula.operand_sum


def arguments(request: Asked, workers: int) -> tuple[list[da.Array], dict[str, Any]]:
    """Return positional and keyword arguments for `matmul` and `explain`; the arrays are lazy."""
    epilog, needed = request["epilog"], Formula(epilog=request["epilog"] or "").inputs

    # An array that is named twice is one array: its chunks are read once.
    load = functools.cache(lambda place, dtype: read(place, workers, dtype))

    def get(text: str, dtype: str | None = request["dtype"]) -> da.Array:
        return load(parse_place(text), dtype)

    extra: dict[str, Any] = {}
    for option, whose, name in (
        ("bias", "epilogs that add one (bias, relu_bias, ...)", next((x for x in needed if x == "bias"), None)),
        ("aux", "the epilogs of a backward pass (drelu, dgelu, ...)", next((x for x in needed if x != "bias"), None)),
    ):
        if request[option] is None and name is not None:
            raise PlanError(f"epilog {epilog!r} needs --{option} FILE")
        if request[option] is not None and name is None:
            raise PlanError(f"--{option} is for {whose}, got {epilog!r}: take one of them, or leave --{option} out")
        if name is not None:
            extra[name] = get(request[option], None) if name == "relu_aux" else get(request[option])
    options: dict[str, Any] = {name: request[name] for name in ("alpha", "op_a", "op_b", "epilog", "engine", "method")}
    options |= {"beta": 1.0 if request["beta"] is None and request["c"] is not None else request["beta"]}
    options |= {"epilog_inputs": extra or None}
    a, b = get(request["a"]), get(request["b"])
    if a.ndim == b.ndim == 2:
        rows, columns = a.chunks[request["op_a"] != "N"], b.chunks[request["op_b"] == "N"]
        options["out_chunks"] = out_chunks((rows, columns), request["chunks"])
    return [a, b, *([get(request["c"])] if request["c"] is not None else [])], options


def out_chunks(chunks: Sequence[Sequence[int]], wanted: Sequence[int] | None) -> Sizes:
    """Return equal chunks for an array that is to be stored: like its own, or as wanted along the last axes."""
    sizes = [max(1, *axis) for axis in chunks]
    if wanted and sizes:
        last = [wanted[0]] * len(sizes) if len(wanted) == 1 else list(wanted)
        count = min(2, len(last), len(sizes))
        sizes[-count:] = last[-count:]
    return cast(Sizes, normalize_chunks(tuple(sizes), tuple(map(sum, chunks))))


# The plan


def explained(request: Asked, scheduler: str | None) -> Explanation:
    """Return the plan for a product: on a cluster, or on workers of this machine that are only imagined."""
    if scheduler is None:
        count = request["workers"] or default_workers()
        arrays, options = arguments(request, count)
        with dask.config.set(scheduler="threads"):  # whatever client there may be in this process
            return explain(*arrays, **options, workers=count)
    with connected(scheduler, None, "explain") as client:
        arrays, options = arguments(request, _worker_count(client))
        return explain(*arrays, **options)


def plan_page(plan: Explanation, title: str) -> str:
    """Return a plan as a page for browsers."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title></head>\n"
        f'<body style="font-family: sans-serif; margin: 2em">\n{plan._repr_html_()}\n</body></html>\n'
    )


def write_page(path: Path, text: str) -> None:
    """Write a page to a file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--html {path} can't be written: {error.strerror}; pass another path") from error


# The product


def multiply_files(request: Asked, say: Say) -> None:
    """Multiply and store the result."""
    out, aux_out, overwrite, scheduler = (request[name] for name in ("out", "aux_out", "overwrite", "scheduler"))
    targets = [parse_place(out), *([parse_place(aux_out)] if aux_out is not None else [])]
    if aux_out is not None and not kept(request):
        raise PlanError(
            f"--aux-out is for epilogs with an auxiliary output (relu_aux, ...), got {request['epilog']!r}: take one "
            "of them, or leave --aux-out out"
        )
    if len({place.target for place in targets}) < len(targets):
        raise PlanError(f"--out and --aux-out are the same: {out}")
    for place in targets:
        check_inputs(place, places(request))
        check_target(place, overwrite)
    if scheduler is None:
        # Before a cluster is started: most mistakes show here.
        explained(request, None)
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(staged(place, overwrite)) for place in targets]
        with connected(scheduler, request["workers"], "matmul") as client:
            if scheduler is not None:
                _check_paths(client, [place.path for place in places(request) if not place.remote], os.R_OK)
                _check_paths(client, [str(path.parent) for path in paths if path], os.W_OK)
            arrays, options = arguments(request, _worker_count(client))
            plan = explain(*arrays, **options)
            if isinstance(plan, Plan | WavePlan):
                plan = dataclasses.replace(plan, left=None)  # It is made, whatever @ would do.
            say(repr(plan).splitlines()[0])
            product = matmul(*arrays, **options)
            results = [product[0], product[1][kept(request)]] if isinstance(product, tuple) else [product]
            results = [x.rechunk(out_chunks(x.chunks, request["chunks"])) for x in results[: len(targets)]]
            for array, place in zip(results, targets, strict=True):
                check_type(place, array.dtype)
            started = time.perf_counter()
            held = list(client.persist(results))
            if sys.stderr.isatty():
                progress(held)
            held = [computed(array) for array in held]
            seconds = time.perf_counter() - started
            rate = f", {plan.flops / seconds / 1e9:.3g} GFLOP/s" if isinstance(plan, Plan) and plan.flops else ""
            say(f"read and multiplied in {format_time(seconds)}{rate}")
            for array, path, place in zip(held, paths, targets, strict=True):
                write(client, array, path, place)
        del held
    for array, place in zip(results, targets, strict=True):
        say(f"{place}: {' x '.join(map(str, array.shape))} {array.dtype}, {format_bytes(array.nbytes)}")


def _worker_count(client: Client) -> int:
    count = len(client.nthreads())
    if not count:
        raise DistMMError(f"the cluster at {client.scheduler.address} has no workers: start some, dask worker ADDRESS")
    return count


def _check_paths(client: Client, paths: Sequence[str], mode: int) -> None:
    """Make sure that the workers see the same files as this process."""
    for path in dict.fromkeys(paths):
        blind = [address for address, seen in client.run(os.access, path, mode).items() if not seen]
        if blind:
            verb = "write to" if mode == os.W_OK else "read"
            raise DistMMError(f"worker {blind[0]} can't {verb} {path}: files must be where all workers see them")
