"""The sums of a product: whether they can go on where earlier ones lie, and whether half of them will do. Pure."""

from __future__ import annotations

from dask_distmm.planning.problem import Problem

__all__ = ["goes_on", "is_gram"]


def goes_on(problem: Problem) -> bool:
    """Whether sums of an earlier run can grow in place: their type is that of D."""
    return problem.formula.partial and problem.result_type == problem.compute_type


def is_gram(problem: Problem) -> bool:
    """Whether D is symmetric, or Hermitian, because B is A transposed, or conjugated too, as in ``X.T @ X``."""
    across = problem.turned[0] != problem.turned[1] and not problem.same
    real = problem.operand_type.kind != "c"
    return problem.shared and across and (real or problem.conjugated[0] != problem.conjugated[1])
