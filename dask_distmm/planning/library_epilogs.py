"""The formulas that NVIDIA's libraries can do inside of a multiply. Pure.

The peer engine's products are cuBLASLt's. It computes the transpose of D, so a value for each column of D is native to
it; and an element of D must be computed in one go (see `block_schedule.native`). With 16-bit types its epilogs are not
exact either where extents or addresses are odd (measured: some algorithms round the product first, up to 31 times the
bound, some make 0 of relu(NaN), some refuse); with float32 and float64 they are.
"""

from __future__ import annotations

import numpy as np

from dask_distmm.planning.problem import Problem

NATIVE_EPILOGS = ("relu", "gelu", "bias", "relu_bias", "gelu_bias")


def library_epilog(problem: Problem) -> str | None:
    """Return the epilog that NVIDIA's libraries have for a formula, ``""`` for a factor only, or None."""
    formula = problem.formula
    if (
        formula.trivial
        or formula.function
        or formula.amax
        or formula.partial
        or complex(*formula.beta) != 0
        or formula.scales
        or formula.scale_d != 1
    ):
        return None
    if problem.matrix_types != (problem.dtype,) * 2:
        return None
    if not formula.epilog or formula.operand_sum:
        return ""
    dtype = problem.result_type
    if (
        formula.epilog not in NATIVE_EPILOGS
        or dtype.kind == "c"
        or (dtype == np.float64 and formula.activation == "gelu")
    ):
        return None
    return str(formula.epilog)
