"""The commands ``dask distmm ...`` (an entry point of Dask's command line) and ``python -m dask_distmm ...``."""

from __future__ import annotations

import click

from dask_distmm._version import __version__

__all__ = ["main"]

# What a shell reports of a program that Ctrl-C (signal 2) has ended.
INTERRUPTED = 130


@click.group(name="distmm", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 88})
@click.version_option(__version__, prog_name="dask_distmm")
def main() -> None:
    """Distributed matrix multiply for Dask arrays."""


@main.command()
@click.option(
    "--size",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Rows and columns of the two random matrices (float64).",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    show_default="one a core, at least 2; on GPUs one each",
    help="Worker processes to start.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def demo(ctx: click.Context, size: int, workers: int | None, debug: bool) -> None:
    """Multiply on a local cluster: plan, check against NumPy, time next to Dask's own.

    Starts worker processes on this machine and runs two jobs: the principal components of a real data
    set (handwritten digits, standardised and stored in Zarr), and a product of two random square matrices.
    """
    # Here, so that `dask --help` and other commands do not import what only this one needs.
    from dask_distmm import demo as job

    try:
        workers = workers or job.default_workers()
        problem = job.too_little_memory(size, workers, job.available_memory())
        if problem is not None:
            click.echo(f"Error: {problem}", err=True)
            ctx.exit(2)
        job.run(size, workers, click.echo)
    except KeyboardInterrupt:
        click.echo("Interrupted: the cluster is stopped, the temporary folder is removed.", err=True)
        ctx.exit(INTERRUPTED)
    except (click.exceptions.Exit, click.ClickException):
        raise
    except Exception as error:
        if debug:
            raise
        # The first line: some errors go on with pages of details.
        reason = (str(error).splitlines() or [""])[0]
        click.echo(f"Error: {type(error).__name__}: {reason} (--debug shows the traceback)", err=True)
        ctx.exit(1)
