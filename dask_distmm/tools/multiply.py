"""``dask distmm matmul`` and ``dask distmm explain``: products of arrays in files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dask
import dask.array as da
from dask.utils import format_bytes, format_time
from distributed import Client, as_completed, futures_of

from dask_distmm import Explanation, Plan, PlanError, explain, matmul, progress
from dask_distmm.errors import DistMMError
from dask_distmm.numeric.epilogs import Formula
from dask_distmm.tools.files import (
    Place,
    check_folder,
    check_inputs,
    check_target,
    check_type,
    equal_chunks,
    parse_place,
    read,
    staged,
    write,
)
from dask_distmm.tools.local import connected, default_workers

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class FileProduct:
    """A product of arrays in files, as a user asks for it on the command line."""

    # Where the operands are, and the inputs of the epilog: its bias, and the output that a forward pass has kept.
    a: str
    b: str
    c: str | None = None
    bias: str | None = None
    aux: str | None = None
    # As for `dask_distmm.matmul`.
    alpha: float = 1.0
    beta: float | None = None
    op_a: str = "N"
    op_b: str = "N"
    epilog: str | None = None
    engine: str | None = None
    method: str | None = None
    # Type to which all operands are converted; None for as stored.
    dtype: str | None = None
    # Chunk sizes of the last axes of D; None for the operands'.
    chunks: tuple[int, ...] | None = None

    @property
    def places(self) -> list[Place]:
        """Where the inputs are."""
        return [parse_place(text) for text in (self.a, self.b, self.c, self.bias, self.aux) if text is not None]

    @property
    def kept(self) -> str:
        """Name of the epilog's auxiliary output; empty for none."""
        formula = Formula(epilog=self.epilog or "")
        return formula.saved or formula.sums or formula.operand_sum

    def arguments(self, workers: int) -> tuple[list[da.Array], dict[str, Any]]:
        """Return positional and keyword arguments for `matmul` and `explain`; the arrays are lazy."""
        arrays: dict[tuple[Place, str | None], da.Array] = {}

        def get(text: str, dtype: str | None = self.dtype) -> da.Array:
            # An array that is named twice is one array: its chunks are read once.
            place = parse_place(text)
            if (place, dtype) not in arrays:
                arrays[place, dtype] = read(place, workers, dtype)
            return arrays[place, dtype]

        needed = Formula(epilog=self.epilog or "").inputs
        given: dict[str, Any] = {} if self.bias is None else {"bias": get(self.bias)}
        if self.aux is not None:
            name = next((name for name in needed if name.endswith("_aux")), None)
            if name is None:
                raise PlanError(
                    f"--aux is for the epilogs of a backward pass (drelu, dgelu, ...); found {self.epilog!r}: take one "
                    "of them, or leave --aux out"
                )
            given[name] = get(self.aux, None if name == "relu_aux" else self.dtype)
        if self.bias is not None and "bias" not in needed:
            raise PlanError(
                f"--bias is for epilogs that add one (bias, relu_bias, ...); found {self.epilog!r}: take one of them, "
                "or leave --bias out"
            )
        missing = ["--bias" if name == "bias" else "--aux" for name in needed if name not in given]
        if missing:
            raise PlanError(f"epilog {self.epilog!r} needs {missing[0]} FILE")
        found: dict[str, Any] = {
            "alpha": self.alpha,
            "beta": 1.0 if self.beta is None and self.c is not None else self.beta,
            "op_a": self.op_a,
            "op_b": self.op_b,
            "epilog": self.epilog,
            "epilog_inputs": given or None,
            "engine": self.engine,
            "method": self.method,
        }
        a, b = get(self.a), get(self.b)
        if a.ndim == b.ndim == 2:
            rows = a.chunks[0 if self.op_a == "N" else 1]
            columns = b.chunks[1 if self.op_b == "N" else 0]
            found["out_chunks"] = out_chunks((rows, columns), self.chunks)
        return [a, b, *([get(self.c)] if self.c is not None else [])], found


def out_chunks(chunks: Sequence[Sequence[int]], wanted: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Return equal chunks for an array that is to be stored: like its own, or as wanted along the last axes."""
    sizes = [max(1, *axis) for axis in chunks]
    if wanted and sizes:
        last = [wanted[0]] * len(sizes) if len(wanted) == 1 else list(wanted)
        count = min(2, len(last), len(sizes))
        sizes[-count:] = last[-count:]
    return equal_chunks([sum(axis) for axis in chunks], sizes)


# The plan


def explained(asked: FileProduct, scheduler: str | None, workers: int | None) -> Explanation:
    """Return the plan for a product: on a cluster, or on workers of this machine that are only imagined."""
    if scheduler is None:
        count = workers or default_workers()
        arrays, options = asked.arguments(count)
        with dask.config.set(scheduler="threads"):  # whatever client there may be in this process
            return explain(*arrays, **options, workers=count)
    with connected(scheduler, None, "explain") as client:
        arrays, options = asked.arguments(_worker_count(client))
        return explain(*arrays, **options)


def check_page(path: Path) -> None:
    """Make sure that a page can be written, before the work for it; see `check_folder`."""
    check_folder(f"--html {path}", path.absolute().parent)


def plan_page(plan: Explanation, title: str) -> str:
    """Return a plan as a page for browsers."""
    from html import escape

    body = plan._repr_html_()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title></head>\n"
        f'<body style="font-family: sans-serif; margin: 2em">\n{body}\n</body></html>\n'
    )


def write_page(path: Path, text: str) -> None:
    """Write a page to a file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--html {path} can't be written: {error.strerror}; pass another path") from error


# The product


def multiply_files(
    asked: FileProduct,
    out: str,
    aux_out: str | None,
    *,
    scheduler: str | None,
    workers: int | None,
    overwrite: bool,
    say: Say,
) -> None:
    """Multiply and store the result."""
    targets = [parse_place(out), *([parse_place(aux_out)] if aux_out is not None else [])]
    if aux_out is not None and not asked.kept:
        raise PlanError(
            f"--aux-out is for epilogs with an auxiliary output (relu_aux, ...); found {asked.epilog!r}: take one of "
            "them, or leave --aux-out out"
        )
    if len({place.target for place in targets}) < len(targets):
        raise PlanError(f"--out and --aux-out are the same: {out}")
    for place in targets:
        check_inputs(place, asked.places)
        check_target(place, overwrite)
    if scheduler is None:
        # Before a cluster is started: most mistakes show here.
        explained(asked, None, workers)
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(staged(place, overwrite)) for place in targets]
        with connected(scheduler, workers, "matmul") as client:
            if scheduler is not None:
                _check_paths(client, [place.path for place in asked.places if not place.remote], os.R_OK)
                _check_paths(client, [str(path.parent) for path in paths if path], os.W_OK)
            arrays, options = asked.arguments(_worker_count(client))
            plan = explain(*arrays, **options)
            say(repr(plan).splitlines()[0])
            results = _results(asked, matmul(*arrays, **options), len(targets))
            for array, place in zip(results, targets, strict=True):
                check_type(place, array.dtype)
            started = time.perf_counter()
            held = _computed(client, results)
            seconds = time.perf_counter() - started
            say(_speed(plan, seconds))
            for array, path, place in zip(held, paths, targets, strict=True):
                write(client, array, path, place)
        del held
    for array, place in zip(results, targets, strict=True):
        say(f"{place}: {' x '.join(map(str, array.shape))} {array.dtype}, {format_bytes(array.nbytes)}")


def _results(asked: FileProduct, found: Any, count: int) -> list[da.Array]:
    """Return D, and the auxiliary output if it is wanted, in equal chunks."""
    results = [found[0], found[1][asked.kept]] if isinstance(found, tuple) else [found]
    kept = []
    for array in results[:count]:
        chunks = out_chunks(array.chunks, asked.chunks)
        kept.append(array if array.chunks == chunks else array.rechunk(chunks))
    return kept


def _speed(plan: Explanation, seconds: float) -> str:
    flops = plan.flops if isinstance(plan, Plan) else 0
    rate = f", {flops / seconds / 1e9:.1f} GFLOP/s" if flops else ""
    return f"read and multiplied in {format_time(seconds)}{rate}"


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


def _computed(client: Client, results: Sequence[da.Array]) -> list[da.Array]:
    """Have the cluster compute arrays, show in a terminal how far it is; return them in the cluster's memory."""
    held: list[da.Array] = list(client.persist(list(results)))
    if sys.stderr.isatty():
        progress(held)
    for future in as_completed(futures_of(held)):
        if future.status != "finished":
            future.result()  # raises the task's error
    return held
