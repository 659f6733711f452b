"""The kinds of computations: which class a message means, and who plans it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from dask_distmm.errors import PlanError, ProjectedMemoryError, ProtocolError
from dask_distmm.planning.computation import Computation
from dask_distmm.planning.demand import Worker
from dask_distmm.planning.factor.plan import FactorPlacement
from dask_distmm.planning.factor.planner import plan_factorization
from dask_distmm.planning.factor.problem import FactorProblem
from dask_distmm.planning.placement import Placement, Where
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.planner import plan
from dask_distmm.planning.problem import Problem
from dask_distmm.planning.program import ProgramPlacement, ProgramProblem, plan_program

# By the kind that ``to_wire`` names: the class of the computation, and that of its plans.
_KINDS: dict[str, tuple[type[Problem | FactorProblem | ProgramProblem], type[Placement]]] = {
    Problem.kind: (Problem, Plan),
    FactorProblem.kind: (FactorProblem, FactorPlacement),
    ProgramProblem.kind: (ProgramProblem, ProgramPlacement),
}


def problem_from_wire(wire: Any) -> Computation:
    """Make a computation from what its ``to_wire`` gave, checked."""
    return _classes(wire)[0].from_wire(wire)


def plan_from_wire(wire: Any) -> Placement:
    """Make a plan from what its ``to_wire`` gave, checked."""
    try:
        problem = wire["problem"]
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"malformed plan: {error!r}") from error
    return _classes(problem)[1].from_wire(wire)


def _classes(wire: Any) -> tuple[type[Problem | FactorProblem | ProgramProblem], type[Placement]]:
    kind = wire.get("kind") if isinstance(wire, dict) else None
    if kind not in _KINDS:
        raise ProtocolError(f"malformed problem: a computation of kind {kind!r}; known are {', '.join(_KINDS)}")
    return _KINDS[kind]


def plan_computation(
    problem: Computation,
    roster: Sequence[Worker],
    where: Where | None = None,
    *,
    engine: Sequence[str],
    sources: Sequence[Worker] = (),
) -> Placement:
    """Choose how a computation of any kind runs, fast; parameters and errors are those of `planner.plan`.

    A factorization or a program is for the first engine that can run it in the memory that there is.
    """
    if isinstance(problem, Problem):
        return plan(problem, roster, where, engine=engine, sources=sources, shortlisted=True)
    assert isinstance(problem, FactorProblem | ProgramProblem)
    planned: Any = plan_factorization if isinstance(problem, FactorProblem) else plan_program
    *first, last = engine
    for name in first:
        with contextlib.suppress(PlanError, ProjectedMemoryError):
            return planned(problem, roster, where, engine=name, sources=sources)  # type: ignore[no-any-return]
    return planned(problem, roster, where, engine=last, sources=sources)  # type: ignore[no-any-return]
