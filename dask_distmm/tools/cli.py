"""The commands ``dask distmm ...`` (an entry point of Dask's command line) and ``python -m dask_distmm ...``.

Options and messages only. The work of a command is in a module that is imported when the command is called, so that
`dask --help` and other commands don't wait for it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dask_distmm._version import __version__
from dask_distmm.errors import PlanError, page
from dask_distmm.planning import ENGINES, METHODS

# The exit status by which a shell knows a program that Ctrl-C (signal 2) has ended.
INTERRUPTED = 130
# The exit status of wrong options; click's own, too.
WRONG = 2

Function = Callable[..., Any]


@click.group(name="distmm", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 88})
@click.version_option(__version__, prog_name="dask_distmm")
def main() -> None:
    """Distributed matrix multiply for Dask arrays."""


_OPTION = re.compile(r"\b(op_a|op_b|alpha|beta|epilog|engine|method|workers)=('[^' ]*'|[\w.]+)")


def _as_option(match: re.Match[str]) -> str:
    """Return ``op_a='T'`` as ``--op-a T``."""
    return f"--{match[1].replace('_', '-')} {match[2].strip(chr(39))}"


def guarded(interrupted: str, failed: int = 1) -> Callable[[Function], Function]:
    """Give a command the option ``--debug``; have its errors said in one line, and end with an exit status."""

    def decorate(function: Function) -> Function:
        @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
        @click.pass_context
        @functools.wraps(function)
        def run(ctx: click.Context, /, *, debug: bool, **options: Any) -> None:
            try:
                ctx.invoke(function, **options)
            except KeyboardInterrupt:
                click.echo(f"Interrupted: {interrupted}", err=True)
                ctx.exit(INTERRUPTED)
            except (click.exceptions.Exit, click.ClickException):
                raise
            except Exception as error:
                if debug:
                    raise
                # The first line: some errors continue with pages of details. Options have this command's names.
                reason = _OPTION.sub(_as_option, (str(error).splitlines() or [""])[0])
                click.echo(f"Error: {type(error).__name__}: {reason} (--debug shows the traceback)", err=True)
                ctx.exit(WRONG if isinstance(error, PlanError) else failed)

        return run

    return decorate


def together(*options: Function) -> Callable[[Function], Function]:
    """Return one decorator for several options, in their order."""
    return lambda function: functools.reduce(lambda command, option: option(command), reversed(options), function)


def worker_count(text: str, default: str = "one per core, at least 2; on GPUs one per GPU") -> Function:
    """Return the option ``--workers``."""
    return click.option("--workers", type=click.IntRange(min=1), show_default=default, help=text)


SCHEDULER = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Address of a Dask scheduler, for example tcp://host:8786; its cluster does the work.",
)
WORKERS = worker_count("Worker processes to start on this machine, where no --scheduler is given.")


class Sections(click.Command):
    """A command whose help has its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those of each group under its title."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(_GROUPS.get(str(param.name), "Options"), []).append(record)
        for title in ("Product", "Epilog", "How", "Files", "Where", "Options"):
            if records := groups.get(title):
                with formatter.section(title):
                    formatter.write_dl(records)


# The group of each option in a command's help; the others are "Options".
_GROUPS = {
    **dict.fromkeys(["op_a", "op_b", "alpha", "c", "beta", "dtype"], "Product"),
    **dict.fromkeys(["epilog", "bias", "aux"], "Epilog"),
    **dict.fromkeys(["chunks", "engine", "method"], "How"),
    **dict.fromkeys(["out", "aux_out", "overwrite", "html"], "Files"),
    **dict.fromkeys(["scheduler", "workers"], "Where"),
}


def sizes(*names: str, most: int, **settings: Any) -> Function:
    """Return an option of up to `most` positive integers, separated by commas."""

    def parsed(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        parts = [part.strip() for part in (value or "").split(",")]
        if value is None:
            return None
        if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) > most:
            raise click.BadParameter(f"{value!r}: expected up to {most} positive numbers, for example 1024,2048")
        return tuple(map(int, parts))

    return click.option(*names, callback=parsed, **settings)


OPERANDS = together(
    click.argument("a"),
    click.argument("b"),
    click.option("--op-a", type=click.Choice(["N", "T", "C"]), default="N", help="Take A, its transpose or A^H."),
    click.option("--op-b", type=click.Choice(["N", "T", "C"]), default="N", help="The same of B."),
    click.option("--alpha", type=float, default=1.0, help="Factor of the product."),
    click.option("--c", "c", metavar="FILE", help="C, which is added."),
    click.option("--beta", type=float, show_default="1 with --c", help="Factor of C."),
    click.option(
        "--epilog",
        metavar="NAME",
        help=f"Function of the product before it is stored: relu, gelu_bias, ... ({page('epilogs')}).",
    ),
    click.option("--bias", metavar="FILE", help="Bias of the epilog: (n,), one value per column; or (m, 1)."),
    click.option("--aux", metavar="FILE", help="What a forward pass kept, for drelu, dgelu, ..."),
    click.option("--dtype", metavar="TYPE", help="Type to convert A and B to first, for example float32."),
    sizes("--chunks", most=2, metavar="ROWS[,COLUMNS]", help="Chunks of the result."),
    click.option(
        "--engine",
        type=click.Choice(["auto", *(name for name, engine in ENGINES.items() if "product" in engine.computes)]),
        help="Which engine multiplies.",
    ),
    click.option("--method", type=click.Choice(["auto", *METHODS]), help="How the work is distributed."),
)


@main.command()
@click.option(
    "--size",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Rows and columns of the two random matrices (float64).",
)
@worker_count("Worker processes to start.")
@guarded("the cluster is stopped, the temporary folder is removed.")
@click.pass_context
def demo(ctx: click.Context, /, size: int, workers: int | None) -> None:
    """Multiply on a local cluster: plan, check against NumPy, time next to Dask's own.

    Starts worker processes on this machine and runs two jobs: the principal components of a real data
    set (handwritten digits, standardised and stored in Zarr), and a product of two random square matrices.
    """
    from dask_distmm.tools import local
    from dask_distmm.tools import measure as job

    workers = workers or local.default_workers()
    problem = job.too_little_memory(size, workers, local.available_memory())
    if problem is not None:
        click.echo(f"Error: {problem}", err=True)
        ctx.exit(2)
    job.run_demo(size, workers, click.echo)


@main.command(cls=Sections)
@OPERANDS
@click.option("--out", required=True, metavar="FILE", help="Where the result goes.")
@click.option("--aux-out", metavar="FILE", help="Where the epilog's auxiliary output goes; dropped by default.")
@click.option("--overwrite", is_flag=True, help="Replace what is there, once the new result is complete.")
@SCHEDULER
@WORKERS
@guarded("no half-written result is left.")
def matmul(**request: Any) -> None:
    """Multiply the arrays in files A and B, and store the result.

    \b
    Files:
      X.zarr                  a Zarr array
      X.zarr::path/of/array   an array in a Zarr group
      X.npy                   NumPy's format
      X.h5, X.h5::dataset     HDF5 (needs h5py)

    The result is written beside its place and renamed when it is complete: after an error or Ctrl-C
    nothing is left behind, and what was there is unchanged. With --scheduler the files must be where all
    workers see them.

    \b
    Examples:
      dask distmm matmul A.zarr B.zarr --out D.zarr
      dask distmm matmul X.npy X.npy --op-a T --dtype float32 --out gram.npy
      dask distmm matmul X.zarr W.npy --epilog relu_bias --bias b.npy --out H.zarr
    """  # noqa: D301 - click reads the backspace
    from dask_distmm.tools import multiply

    multiply.multiply_files(request, click.echo)


@main.command(cls=Sections)
@OPERANDS
@SCHEDULER
@worker_count("Workers to imagine, where no --scheduler is given.", "as `matmul` would start")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan as a page with pictures.")
@guarded("nothing was computed.")
def explain(html: Path | None, **request: Any) -> None:
    """Show how A and B would be multiplied: method, bytes, memory, time. Computes nothing.

    Takes the files and options of `matmul`. Without --scheduler it plans for imagined workers with one
    thread each and no memory limit.
    """
    from dask_distmm.tools import multiply

    if html is not None:
        # Before the work for it.
        multiply.check_folder(f"--html {html}", html.absolute().parent)
    plan = multiply.explained(request, request["scheduler"])
    click.echo(repr(plan))
    if html is not None:
        multiply.write_page(html, multiply.plan_page(plan, f"{request['a']} @ {request['b']}"))
        click.echo(f"pictures: {html}")


@main.command()
@sizes(
    "--size",
    "sizes",
    most=16,
    show_default="1024,2048; on GPUs 4096,8192",
    metavar="N,N,...",
    help="Rows of the square factors.",
)
@sizes(
    "--chunks", "grids", most=16, default="4,8", show_default=True, metavar="G,G,...", help="Chunks along each side."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64"]),
    default="float64",
    show_default=True,
    help="Type of the matrices.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each case, not a table.")
@SCHEDULER
@WORKERS
@guarded("the cluster is as it was before.")
def bench(as_json: bool, **options: Any) -> None:
    """Time square products next to Dask's own matmul, and NumPy in one process.

    Inputs are fresh random matrices in memory, results are checked; times are medians, by turns. NumPy
    has its turn only if the cluster is started here, on CPUs.
    """
    from dask_distmm.tools import measure as job

    if not as_json:
        click.echo(job.line(job.TITLES))
    for row in job.run_bench(**options):
        click.echo(json.dumps(row) if as_json else job.row_text(row))


@main.command()
@SCHEDULER
@WORKERS
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.",
    show_default="distmm-measured.yaml in the folder of Dask's configuration",
)
@guarded("nothing was written.")
def calibrate(**options: Any) -> None:
    """Measure the constants of the cost model on a cluster, and write them for Dask's configuration.

    Takes 20 seconds. Prints what the configuration has, what was measured, and the ratio. Programs that start
    afterwards read the file; what is in distmm.yaml in the same folder wins.
    """
    from dask_distmm.tools import measure as job

    job.run_calibrate(**options, say=click.echo)


@main.command()
@SCHEDULER
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@guarded("nothing was changed.", failed=2)
@click.pass_context
def check(ctx: click.Context, /, scheduler: str | None, as_json: bool) -> None:
    """Show which engine this machine, or every worker of a cluster, uses, and what to fix.

    Engine and why, GPUs, libraries and their versions, memory, threads; what differs between workers.

    \b
    Exit status:
      0   no problems found
      1   multiplies work, but something should be fixed
      2   multiplies fail, or that could not be found out
    """  # noqa: D301 - click reads the backspace
    from dask_distmm.tools import check as job

    report = job.examine(scheduler)
    click.echo(json.dumps(report.to_json(), indent=1) if as_json else job.report_text(report))
    ctx.exit(report.status)
