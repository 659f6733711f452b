"""The phases of each kind of problem: which panels, in which order, are applied to which block columns."""

from __future__ import annotations

import dataclasses

from dask_distmm.planning.factor.problem import Factorization
from dask_distmm.planning.factor.steps import Columns, Operation, Part

_FACTORS = ("cholesky", "lu", "qr")


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Panels that are applied to block columns, one panel after the other."""

    # How a panel changes a block column. Of a factorization, each panel is factorized by its owner first.
    operation: Operation
    # Which part of the panel is needed.
    part: Part
    # Numbers of the panels in their order.
    panels: tuple[int, ...]
    # For each panel, the first and the last + 1 of the block columns that it is applied to.
    targets: tuple[tuple[int, int], ...]
    # Whether the one block column that panels are applied to goes from owner to owner of these, and home again.
    # Otherwise its rank gets all panels, which is far more than one right-hand side.
    carried: bool = False

    @property
    def factors(self) -> bool:
        """Whether panels are factorized."""
        return self.operation.name in _FACTORS


def factored(problem: Factorization) -> str:
    """Return which factorization A goes through: ``"cholesky"``, ``"lu"``, ``"qr"``, or ``""`` for none."""
    if problem.kind in ("qr", "lstsq", "pinv"):
        return "qr"
    if problem.kind == "solve_triangular" or problem.spectral:
        return ""
    return "cholesky" if problem.hermitian else "lu"


def phases(problem: Factorization, columns: Columns) -> tuple[Phase, ...]:
    """Return the phases of a problem; a decomposition on one rank has none.

    Where eigenvalues are shared out, the reflectors of the tridiagonal reduction are applied to eigenvectors.
    """
    name, last, count = factored(problem), columns.first(1), columns.count
    second = len(columns.matrices) > 1
    if problem.spectral:
        reflectors = columns.matrices[0].shape[0] - 1 if columns.below and second else 0
        order = tuple(range(-(-reflectors // columns.matrices[0].width)))[::-1]
        return (Phase(Operation("reflect"), "lower", order, ((last, count),) * len(order)),) if order else ()
    panels = tuple(range(-(-min(columns.matrices[0].shape) // columns.matrices[0].width)))
    # Right-hand sides go through the factorization with A; but not the columns that are to become Q, or a solution of
    # an underdetermined system.
    together = second and problem.kind != "qr" and not problem.by_adjoint
    found = []
    if name:
        stop = count if together else last
        found.append(Phase(Operation(name), "lower", panels, tuple((panel + 1, stop) for panel in panels)))
    others = ((last, count),) * len(panels)
    if problem.kind == "solve_triangular":
        found.append(_substitution(problem.lower, problem.substituted, problem.unit_diagonal, panels, others))
    elif second and problem.kind != "qr":
        if name == "cholesky":
            found.append(_substitution(True, "C", False, panels, others))
        else:
            found.append(_substitution(False, "C" if problem.by_adjoint else "N", False, panels, others))
    if second and (problem.kind == "qr" or problem.by_adjoint):
        # The columns of Q before a panel's first one are those of the identity in its rows: they stay as they are.
        reflected = tuple((last + panel, count) for panel in panels) if problem.kind == "qr" else others
        found.append(Phase(Operation("reflect"), "lower", panels[::-1], reflected[::-1]))
    return tuple(found)


def carrying(found: tuple[Phase, ...], columns: Columns) -> tuple[Phase, ...]:
    """Return the phases, with a single right-hand side carried in substitutions."""
    first = columns.first(1)
    if columns.ranks == 1 or columns.count != first + 1 or columns.blocks[first].stop > 1:
        return found
    return tuple(dataclasses.replace(one, carried=one.operation.name == "substitute") for one in found)


def _substitution(
    lower: bool, op: str, unit: bool, panels: tuple[int, ...], targets: tuple[tuple[int, int], ...]
) -> Phase:
    """Return the solution of a triangular system: from the first block row to the last one, or from the last one."""
    order = panels if lower == (op == "N") else panels[::-1]
    return Phase(Operation("substitute", lower, op, unit), "lower" if lower else "upper", order, targets)
