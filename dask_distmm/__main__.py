"""``python -m dask_distmm``: the same commands as ``dask distmm``."""

from dask_distmm.tools.cli import main

# Worker processes that are spawned import this module again, under another name.
if __name__ == "__main__":
    main(prog_name="python -m dask_distmm")
