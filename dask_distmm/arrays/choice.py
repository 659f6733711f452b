"""How a product of matrices is made: left to Dask's own tasks, one run, or waves.

Waves are for operands that do not fit into memory together, or that ranks make meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any

from dask.array.core import normalize_chunks
from dask.utils import format_bytes, format_time

from dask_distmm.arrays.fallback import added_in_64_bits, why_not
from dask_distmm.arrays.request import Request, unfit
from dask_distmm.config import Budget, dask_costs, minimum_flops, raises_beyond_memory, wave_budget
from dask_distmm.errors import NoWorkersError, PlanError, ProjectedMemoryError
from dask_distmm.graph import DaskTasks, can_be_made
from dask_distmm.planning import Plan, Problem
from dask_distmm.planning.footprint import held_bytes
from dask_distmm.planning.model import models_of
from dask_distmm.planning.placement import CLEARLY, Placement, spills
from dask_distmm.planning.planner import fits_easily
from dask_distmm.planning.waves import Scheme, WavePlan, choose_scheme, in_host, in_host_memory
from dask_distmm.runtime.client import ask_roster, current_client, plan_on, recent_snapshot, runs_faster
from dask_distmm.runtime.messages import Snapshot

if TYPE_CHECKING:
    from distributed import Client

# Chunks that take so long to make (seconds) may be made by ranks, while they multiply. Whether that can be is seen in
# the graph, of which 1,500 chunks take half a second.
_LONG = 0.5
# The sizes of chunks that are tried, and named, where larger ones do not fit into memory.
_SIZES = (10_000, 5_000, 2_000, 1_000, 500, 200)
# The latest of these remedies, by what it is for.
_advised: dict[Any, str] = {}
PAYS = (
    "A run pays for products of more work and of more chunks: dask_distmm.explain(A, B) has both times, and the config "
    "distmm.minimum-flops: 0 makes a run of each product"
)
_ONCE = "tasks use each chunk once, so that they stream by themselves"


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a product is made: in waves, or by a plan for one run; neither where nothing is known of the cluster."""

    # With waves there is a plan if one run would do, too.
    plan: Plan | None = None
    scheme: Scheme | None = None
    # The cluster, as far as the client knows it.
    snapshot: Snapshot | None = None
    # Why the product is left to Dask; empty if it is not.
    left: str = ""

    @property
    def change(self) -> str:
        """What would change that a product is left to Dask."""
        if self.left.endswith(_ONCE):
            return "persist() A and B where they fit into memory"
        return PAYS * bool(self.left)

    @property
    def on_gpus(self) -> bool:
        """Whether GPUs multiply."""
        return self.snapshot is not None and all(model.on_gpus for model in models_of(self.snapshot.engines))

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


def why_leave(request: Request) -> str:
    """Return why ``@`` under `enable` leaves a product that can run to Dask, whatever the cluster is; empty if not."""
    if added_in_64_bits(request.dtype):
        return "they add integers of fewer than 64 bits in 64 bits; dask_distmm.matmul keeps their type"
    least, flops = minimum_flops(), 2.0 * math.prod(request.shape) * request.a.shape[-1]
    if least is not None and flops < least:
        return f"{flops:.3g} flops are too little work to pay (config distmm.minimum-flops: {least:.3g})"
    return ""


def decide_now(request: Request, *, enabled: bool = False) -> Decision:
    """Return how a product is made on the cluster as it is now, and log it; no decision if no scheduler can be asked.

    Under `enable` a product may be left to Dask. No plan is made if nobody reads it: if all fits into memory in any
    way, and the ways of one run need not be compared with each other.
    """
    client = current_client()
    try:
        snapshot = recent_snapshot(client, request.problem) if client is not None else None
    except NoWorkersError:
        return Decision()  # There may be some when it is computed.
    if client is None or snapshot is None:
        return Decision()
    decision = Decision(snapshot=snapshot)
    if enabled and (left := _why_streamed(request, decision)):
        return Decision(left=left)
    if request.logger.isEnabledFor(logging.INFO) or not _fits_easily(request, client, snapshot):
        decision = decide(request, client, snapshot, enabled=enabled)
        request.logger.info("%s, lazy\n%r", request.problem.name, decision.made(request.problem))
        return dataclasses.replace(decision, left=why_left(request, decision) if enabled else "")
    if enabled and minimum_flops() is None and not runs_faster(snapshot, request.problem, lazy=any(request.lazy)):
        return Decision(left=f"a run is not expected to take at most {CLEARLY:.0%} of their time")
    return decision


def why_left(request: Request, decision: Decision) -> str:
    """Return why ``@`` under `enable` leaves a product that could run to Dask's own tasks; empty if it does not."""
    if left := _why_streamed(request, decision):
        return left
    plan, scheme = decision.plan, decision.scheme
    if plan is not None and not plan.worth_it:
        return by_times(plan)
    # Ranks on GPUs that make the chunks themselves are faster: they need no task for each, and GPUs multiply meanwhile.
    if minimum_flops() is not None or plan is not None or scheme is None or (scheme.by_ranks and decision.on_gpus):
        return ""
    single = scheme.name == "sums" and request.problem.d.counts == (1, 1)
    return f"it does not fit into memory, and {_ONCE}" if single or scheme.name in ("rows", "cols") else ""


def by_times(plan: Placement) -> str:
    """Return why Dask's own tasks are chosen by time, with the margin that is asked for."""
    assert plan.by_tasks is not None
    own, run = format_time(plan.by_tasks.seconds), format_time(plan.seconds)
    return f"they are expected to take {own}, a run {run} (a run has to take at most {CLEARLY:.0%} of their time)"


def _why_streamed(request: Request, decision: Decision) -> str:
    """Return why a product of chunks that are still to be made is left to Dask; empty if it is not."""
    # With a number of operations as the limit nobody chooses by time or memory.
    if not any(request.lazy) or decision.on_gpus or minimum_flops() is not None:
        return ""
    # How often the chunks of A and those of B are used.
    rows, cols = request.problem.d.counts
    once = all(count == 1 or not lazy for count, lazy in zip((cols, rows), request.lazy, strict=True))
    return f"chunks are still to be made, and {_ONCE}" if once else ""


def by_tasks(request: Request, snapshot: Snapshot | None) -> DaskTasks | None:
    """Return what decides about Dask's own tasks for parts of D; None if there are to be runs."""
    problem = request.problem
    cut_otherwise = problem.d.chunks != (problem.a.chunks[0], problem.b.chunks[1])
    if snapshot is None or request.demands or cut_otherwise or minimum_flops() is not None:
        return None
    a, b = (x.dask if lazy else None for x, lazy in zip(request.lying, request.lazy, strict=True))
    return DaskTasks(tuple(snapshot.workers), tuple(snapshot.engines), dask_costs(), (a, b))


def _fits_easily(request: Request, client: Client, snapshot: Snapshot) -> bool:
    """Whether one run of any kind has room in memory, and no way to multiply was asked for that may not be there."""
    budget, fraction = wave_budget(), request.problem.options.limit_fraction
    if request.method != "auto" or any(request.distributions):
        return False
    if budget is not None and _loading(request, client, snapshot, budget) >= _LONG:
        return False
    room = (budget or Budget(fraction, fraction, 1.0)).of
    workers = (*snapshot.workers, *snapshot.sources)
    return fits_easily(request.problem, min(min(room(worker), room(in_host(worker))) for worker in workers))


def _loading(request: Request, client: Client, snapshot: Snapshot, budget: Budget) -> float:
    """Return the seconds in which workers make the chunks that are not there."""
    problem, (lazy_a, lazy_b) = request.problem, _not_there(request, client)
    a_bytes, b_bytes = problem.m * problem.a.itemsize, problem.n * problem.b.itemsize
    size = problem.k * (a_bytes * lazy_a + b_bytes * (lazy_b and not problem.shared))
    return size / (len(snapshot.workers) + len(snapshot.sources)) / budget.rate(problem.array)


def _not_there(request: Request, client: Client) -> tuple[bool, bool]:
    """Return whether A and B are to be made: a chunk that is lazy here may be in memory for another collection."""
    a, b = (lazy and (x.name, 0, 0) not in client.futures for x, lazy in zip(request.lying, request.lazy, strict=True))
    return a, b


def decide(
    request: Request, client: Client | None, snapshot: Snapshot, *, reordered: bool = False, enabled: bool = False
) -> Decision:
    """Return how a product is made; without a client workers are only imagined."""
    failure: ProjectedMemoryError | None = None
    plan: Plan | None = None
    scheme: Scheme | None = None
    try:
        # Of imagined workers nothing is known, nor of what they hold.
        lazy = client is not None and any(request.lazy)
        plan = plan_on(snapshot, request.problem, reordered=reordered, lazy=lazy)
    except ProjectedMemoryError as error:
        failure = error
    budget = None if client is None else wave_budget()
    if client is not None and budget is not None:
        if plan is None or _spills(plan, budget):
            scheme = _scheme(request, client, budget, request.problem)
        if scheme is None and plan is not None:
            scheme = _scheme_by_ranks(request, client, snapshot, plan, budget)
    if failure is not None and scheme is None:
        more = []
        if client is not None and budget is not None:
            # A loop under enable() asks again and again, and waves of many chunks take a second to plan.
            case = request.problem.a.chunks, request.problem.b.chunks, request.lazy, tuple(failure.limit.items())
            if case not in _advised:
                _advised.clear()
                _advised[case] = _smaller_chunks(request, client, snapshot, budget)
            more.append(_advised[case])
        # Under enable() a product that does not fit is left to these anyway, unless the configuration says otherwise.
        if _may_stream(request, failure) and (not enabled or raises_beyond_memory()):
            how = "the config distmm.memory.exceeded: dask" if enabled else "A @ B under enable()"
            more.append(f"let Dask's own tasks multiply, which may stream it: {how}")
        text = "".join(f". Or {remedy}" for remedy in more if remedy)
        raise ProjectedMemoryError(f"{failure}{text}", failure.projected, failure.limit)
    return Decision(plan, scheme, snapshot)


def _may_stream(request: Request, failure: ProjectedMemoryError) -> bool:
    """Whether Dask's own tasks may make a product that does not fit: a worker can hold one chunk of each matrix."""
    problem = request.problem
    held = sum(x.itemsize * math.prod(map(max, x.chunks)) for x in (problem.a, problem.b, problem.d))
    return request.plain and not request.demands and held <= min(failure.limit.values())


def _smaller_chunks(request: Request, client: Client, snapshot: Snapshot, budget: Budget) -> str:
    """Return the remedy that names the largest chunks of lazy operands with which waves fit; empty if none do."""
    problem, room = request.problem, min((budget.of(worker) for worker in snapshot.workers), default=0.0)
    coarse = [problem[name] for name, is_lazy in zip("ab", request.lazy, strict=True) if is_lazy]
    for size in _SIZES:
        if any(2 * x.itemsize * math.prod(min(size, n) for n in x.shape) > room for x in coarse):
            continue
        # As `chunks=` of Dask's functions cuts each axis.
        finer_chunks = {x.name: normalize_chunks(size, x.shape) for x in coarse if size < max(map(max, x.chunks))}
        cut = {name: dataclasses.replace(problem[name], chunks=chunks) for name, chunks in finer_chunks.items()}
        a, b = (cut.get(name, problem[name]) for name in "ab")
        d = problem.d
        if request.out_chunks is None:
            d = dataclasses.replace(d, chunks=(a.chunks[0], b.chunks[1]))
        matrices = (a, b, *problem.matrices[2:])
        finer = dataclasses.replace(problem, matrices=matrices, wanted=(d, *problem.wanted[1:]))
        if cut and (scheme := _scheme(request, client, budget, finer)) is not None:
            names = [name.upper() for name in cut if not (name == "b" and problem.shared)]
            subject = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} made"
            waves = f"{scheme.count} waves of {format_bytes(scheme.peak_bytes)} a worker, {format_time(scheme.seconds)}"
            return f"use smaller chunks where {subject}: with chunks={size} there are {waves}"
    return ""


def _scheme_by_ranks(request: Request, client: Client, snapshot: Snapshot, plan: Plan, budget: Budget) -> Scheme | None:
    """Return waves in which ranks make the chunks of a product that fits, unless that is expected to take longer.

    It takes less memory, too: chunks are dropped as soon as they are multiplied.
    """
    loading = _loading(request, client, snapshot, budget)
    if loading < _LONG or not all(model.makes for model in models_of([plan.engine])):
        return None
    lazy_a, lazy_b = both = _not_there(request, client)
    operands = zip(request.lying, (lazy_a, lazy_b and not request.problem.shared), strict=True)
    if not all(can_be_made(x, sampled=True) for x, yes in operands if yes):
        return None
    problem = dataclasses.replace(request.problem, method=plan.method)
    scheme = _tried(request.logger, problem, snapshot, both, budget, by_ranks=both, only_by_ranks=True)
    return scheme if scheme is not None and scheme.seconds <= loading + plan.seconds else None


def _tried(
    logger: logging.Logger, problem: Problem, snapshot: Snapshot, lazy: tuple[bool, bool], budget: Budget, **how: Any
) -> Scheme | None:
    """Return the waves of a product; None if there are none that fit, and the log says why."""
    try:
        return choose_scheme(problem, snapshot.workers, lazy, budget, dask_costs(), engine=snapshot.engines, **how)
    except (PlanError, ProjectedMemoryError) as error:
        logger.info("%s", error)
        return None


def _spills(plan: Plan, budget: Budget) -> bool:
    """Whether Dask would move chunks to disk while a plan runs."""
    if in_host_memory(plan.problem, plan.engine):
        held = zip(held_bytes(plan).tolist(), plan.participants, strict=True)
        return any(size > budget.of(in_host(worker)) for size, worker in held)
    return spills(plan, budget)


def _scheme(request: Request, client: Client, budget: Budget, problem: Problem) -> Scheme | None:
    """Return the waves of a product; None if it can't be made in waves, or does not fit in them either."""
    a, b = request.lying
    snapshot = ask_roster(client, problem.demand, [a, b])
    if snapshot is None:
        return None
    lazy_a, lazy_b = (where is None for where in snapshot.placed)
    can_a = lazy_a and can_be_made(a)
    can_b = can_a if problem.shared else lazy_b and can_be_made(b)
    tries = [((lazy_a, lazy_b), (can_a, can_b))]
    # Results that have no room in memory are on disk: Dask reads back those of a wave, and spills others for them.
    tries += [((True, True), (False, False))] * (not (lazy_a and lazy_b))
    schemes = (_tried(request.logger, problem, snapshot, lazy, budget, by_ranks=can) for lazy, can in tries)
    return next((scheme for scheme in schemes if scheme is not None), None)
