"""How a product of matrices is made: left to Dask's own tasks, one run, or waves.

Waves are for operands that do not fit into memory together, or that ranks make meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING

from dask.utils import format_time

from dask_distmm.arrays.fallback import why_not
from dask_distmm.arrays.outputs import is_lazy, operands_under
from dask_distmm.arrays.request import Request, unfit
from dask_distmm.config import Budget, dask_costs, minimum_flops, wave_budget
from dask_distmm.errors import NoWorkersError, PlanError, ProjectedMemoryError
from dask_distmm.graph.build import DaskTasks
from dask_distmm.graph.waves import can_be_made
from dask_distmm.planning import Plan, Problem
from dask_distmm.planning.footprint import held_bytes
from dask_distmm.planning.model import models_of
from dask_distmm.planning.waves import Scheme, WavePlan, choose_scheme, in_host, in_host_memory
from dask_distmm.runtime.client import Snapshot, ask_roster, current_client, recent_snapshot

if TYPE_CHECKING:
    from distributed import Client

# Chunks that take so long to make (seconds) may be made by ranks, while they multiply. Whether that can be is seen in
# the graph, of which 1,500 chunks take half a second.
_LONG = 0.5
_ONCE = "its own tasks use each chunk once, so that they stream by themselves"


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a product is made: in waves, or by a plan for one run; neither where nothing is known of the cluster."""

    # With waves there is a plan if one run would do, too.
    plan: Plan | None = None
    scheme: Scheme | None = None
    # The cluster, as far as the client knows it.
    known: Snapshot | None = None
    # Why the product is left to Dask; empty if it is not.
    left: str = ""

    @property
    def on_gpus(self) -> bool:
        """Whether GPUs multiply."""
        return self.known is not None and all(one.on_gpus for one in models_of(self.known.engines))

    def made(self, problem: Problem) -> Plan | WavePlan:
        """Return the plan, or that of the waves."""
        if self.scheme is not None:
            return WavePlan(problem, self.scheme)
        assert self.plan is not None
        return self.plan


def why_not_run(request: Request, *, cluster: bool) -> str | None:
    """Return why a product can't run here, or None if it can; `cluster`: whether there has to be one."""
    most = max(2, request.a.ndim, request.b.ndim)
    reason = why_not(request.a, request.b, request.types, cluster=cluster, most=most) or unfit(request.extras)
    if reason is None:
        return None
    # Imagined workers are not a demand; and without workers all of D is in one place anyway.
    met = ("workers=",) * (not cluster) + ("epilog=", "gathered=") * (current_client() is None)
    named = [text for text in request.named if not text.startswith(met)]
    if named:
        raise PlanError(
            f"{named[0]} needs a collective run, and there can't be one here: {reason}. Or leave {named[0]} out: then "
            "Dask's own function multiplies"
        )
    return reason


def decide_now(request: Request, problem: Problem, *, enabled: bool = False) -> Decision:
    """Return how a product is made on the cluster as it is now, and log it; no decision if no scheduler can be asked.

    Under `enable` a product may be left to Dask.
    """
    client = current_client()
    try:
        known = recent_snapshot(client, problem) if client is not None else None
    except NoWorkersError:
        return Decision()  # There may be some when it is computed.
    if client is None or known is None:
        return Decision()
    if enabled and (left := why_left(request, problem, Decision(known=known))):
        return Decision(left=left)
    found = decide(request, problem, client, known)
    request.logger.info("%s, lazy\n%r", problem.name, found.made(problem))
    return dataclasses.replace(found, left=why_left(request, problem, found) if enabled else "")


def why_left(request: Request, problem: Problem, found: Decision) -> str:
    """Return why ``@`` under `enable` leaves a product that could run to Dask's own tasks; empty if it does not."""
    rows, cols = problem.chunk_counts("d")
    # With a number of operations as the limit nobody chooses by time or memory.
    by_itself = minimum_flops() is None
    lazy = tuple(map(is_lazy, operands_under(request.a, request.b, problem)))
    if by_itself and not found.on_gpus and any(lazy) and (cols == 1 or not lazy[0]) and (rows == 1 or not lazy[1]):
        return f"chunks are still to be made, and {_ONCE}"
    plan, scheme = found.plan, found.scheme
    if plan is not None and plan.by_tasks is not None and not plan.worth_it:
        seconds = format_time(plan.by_tasks.seconds), format_time(plan.seconds)
        return "its own tasks are expected to take {}, a run {}".format(*seconds)
    # Ranks on GPUs that make the chunks themselves are faster: they need no task for each, and GPUs multiply meanwhile.
    if not by_itself or plan is not None or scheme is None or (scheme.by_ranks and found.on_gpus):
        return ""
    alone = scheme.name in ("rows", "cols") or (scheme.name == "sums" and (rows, cols) == (1, 1))
    return f"it does not fit into memory, and {_ONCE}" if alone else ""


def by_tasks(request: Request, problem: Problem, known: Snapshot | None) -> DaskTasks | None:
    """Return what decides about Dask's own tasks for parts of D; None if there are to be runs."""
    cut_otherwise = problem.out_chunks != (problem.a_chunks[0], problem.b_chunks[1])
    if known is None or request.demands or cut_otherwise or minimum_flops() is not None:
        return None
    graph_a, graph_b = (x.dask if is_lazy(x) else None for x in operands_under(request.a, request.b, problem))
    return DaskTasks(tuple(known.workers), known.engines, dask_costs(), (graph_a, graph_b))


def decide(
    request: Request, problem: Problem, client: Client | None, known: Snapshot, *, reordered: bool = False
) -> Decision:
    """Return how a product is made; without a client workers are only imagined."""
    failure: ProjectedMemoryError | None = None
    plan: Plan | None = None
    scheme: Scheme | None = None
    # Of imagined workers nothing is known, nor of what they hold.
    lazy = client is not None and any(map(is_lazy, operands_under(request.a, request.b, problem)))
    try:
        plan = known.plan(problem, reordered=reordered, lazy=lazy)
    except ProjectedMemoryError as error:
        failure = error
    budget = None if client is None else wave_budget()
    if client is not None and budget is not None:
        if plan is None or _spills(plan, budget):
            scheme = _scheme(request, problem, client, budget)
        if scheme is None and plan is not None:
            scheme = _scheme_by_ranks(request, problem, client, known, plan, budget)
    if failure is not None and scheme is None:
        raise failure
    return Decision(plan, scheme, known)


def _scheme_by_ranks(
    request: Request, problem: Problem, client: Client, known: Snapshot, plan: Plan, budget: Budget
) -> Scheme | None:
    """Return waves in which ranks make the chunks of a product that fits, unless that is expected to take longer.

    It takes less memory, too: chunks are dropped as soon as they are multiplied.
    """
    arrays = operands_under(request.a, request.b, problem)
    # A chunk that is lazy here may be in memory for another collection of the same name.
    lazy_a, lazy_b = (is_lazy(x) and (x.name, 0, 0) not in client.futures for x in arrays)
    lazy = [lazy_a, not problem.shared and lazy_b]
    sizes = problem.m * problem.k * problem.itemsize("a"), problem.k * problem.n * problem.itemsize("b")
    loading = sum(itertools.compress(sizes, lazy)) / (len(plan.participants) * budget.rate(problem.array))
    if loading < _LONG or not all(one.makes for one in models_of([plan.engine])):
        return None
    if not all(can_be_made(x, sampled=True) for x, yes in zip(arrays, lazy, strict=True) if yes):
        return None
    asked, both, engines = dataclasses.replace(problem, method=plan.method), (lazy_a, lazy_b), known.engines
    try:
        scheme = choose_scheme(
            asked, known.workers, both, budget, dask_costs(), engine=engines, by_ranks=both, only_by_ranks=True
        )
    except (PlanError, ProjectedMemoryError) as error:
        request.logger.info("%s", error)
        return None
    return scheme if scheme.seconds <= loading + plan.seconds else None


def _spills(made: Plan, budget: Budget) -> bool:
    """Whether Dask would move chunks to disk while a plan runs."""
    if in_host_memory(made.problem, made.engine):
        held = zip(held_bytes(made).tolist(), made.participants, strict=True)
        return any(size > budget.of(in_host(worker)) for size, worker in held)
    return any(made.projected_bytes[worker.address] > budget.of(worker) for worker in made.participants)


def _scheme(request: Request, problem: Problem, client: Client, budget: Budget) -> Scheme | None:
    """Return the waves of a product; None if it can't be made in waves, or does not fit in them either."""
    arrays = operands_under(request.a, request.b, problem)
    known = ask_roster(client, problem.demand, arrays)
    if known is None:
        return None
    lazy_a, lazy_b = (where is None for where in known.placed)
    can_a = lazy_a and can_be_made(arrays[0])
    can_b = can_a if problem.shared else lazy_b and can_be_made(arrays[1])
    given = problem, known.workers
    try:
        return choose_scheme(
            *given, (lazy_a, lazy_b), budget, dask_costs(), engine=known.engines, by_ranks=(can_a, can_b)
        )
    except (PlanError, ProjectedMemoryError) as error:
        reason = error
    if not (lazy_a and lazy_b):
        # Results that have no room in memory are on disk: Dask reads back those of a wave, and spills others for them.
        with contextlib.suppress(PlanError, ProjectedMemoryError):
            return choose_scheme(*given, (True, True), budget, dask_costs(), engine=known.engines)
    request.logger.info("%s", reason)
    return None
