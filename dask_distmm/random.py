"""Random numbers for functions of `dask_distmm.jit`, by keys, as those of ``jax.random``.

The same key gives the same numbers, for any number of workers and any chunks, and outside of a run, too.
"""

from __future__ import annotations

from dask_distmm.tracing.draw import fold_in, key, normal, randint, split, uniform

__all__ = ["fold_in", "key", "normal", "randint", "split", "uniform"]
