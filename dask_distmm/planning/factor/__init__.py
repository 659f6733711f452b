"""Factorizations and solves as programs of steps on block columns. Pure, and the same for all engines.

`problem` says what is computed, `columns` which rank has which block column, `steps` what a step is, `phases` which
panels are applied to which block columns, in which order; `lookahead` turns phases into each rank's steps; `plan` puts
them together.
"""

from dask_distmm.planning.factor.phases import Phase
from dask_distmm.planning.factor.plan import FactorPlan, block_width, factor_plan, launch_order
from dask_distmm.planning.factor.problem import KINDS, Factorization, TaskOutput
from dask_distmm.planning.factor.steps import (
    Apply,
    Ask,
    Check,
    Columns,
    Decompose,
    DiagonalBlock,
    Diagonalize,
    Drop,
    Factor,
    Get,
    Key,
    Matrix,
    Operation,
    Orient,
    Part,
    Publish,
    Step,
    Tridiagonalize,
)

__all__ = [
    "KINDS",
    "Apply",
    "Ask",
    "Check",
    "Columns",
    "Decompose",
    "DiagonalBlock",
    "Diagonalize",
    "Drop",
    "Factor",
    "FactorPlan",
    "Factorization",
    "Get",
    "Key",
    "Matrix",
    "Operation",
    "Orient",
    "Part",
    "Phase",
    "Publish",
    "Step",
    "TaskOutput",
    "Tridiagonalize",
    "block_width",
    "factor_plan",
    "launch_order",
]
