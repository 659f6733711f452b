"""Plans of factorizations, of programs, and of results that take several runs, as text."""

from __future__ import annotations

from dask.utils import format_bytes, format_time

from dask_distmm.planning.factor.plan import FactorPlacement
from dask_distmm.planning.factor.problem import FactorProblem
from dask_distmm.planning.footprint import is_by_ranks
from dask_distmm.planning.many import ChainPlan
from dask_distmm.planning.model import ENGINES
from dask_distmm.planning.placement import Placement
from dask_distmm.planning.program import ProgramPlacement, ProgramProblem
from dask_distmm.programs.steps import Loop

_WHAT = {
    "local": "one worker has the whole matrix",
    "host": "one worker has the whole matrix; LAPACK on its host computes, or cuSOLVER where it can",
    "columns": "block columns on all workers; the owner of a panel factorizes it, others fetch it",
    "eigh": "block columns on all workers, which reduce the matrix to a tridiagonal one, and divide that",
}


def _method(plan: FactorPlacement) -> str:
    if plan.work.shared:
        return _WHAT["eigh"]
    if plan.work.collective:
        return f"block columns on all workers, which compute together by {ENGINES[plan.engine].library}"
    task = plan.problem.task
    by_host = ENGINES[plan.engine].on_gpus and task.spectral and task.decomposition.on_host
    return _WHAT["host" if by_host else plan.method]


def factor_text(plan: FactorPlacement) -> str:
    """Return the text of a plan."""
    problem, work = plan.problem, plan.work
    blocks = sum(matrix.count for matrix in work.columns.matrices)
    dealt = work.phases or work.collective or work.shared
    matrices = [
        f"  {name.upper():10}{sum(rows)} x {sum(cols)} {problem.task.dtype}, {len(rows)} x {len(cols)} chunks"
        for name, (rows, cols) in zip(problem.operands, problem.chunks, strict=True)
    ]
    outputs = ", ".join(
        f"{one.name} {sum(one.chunks[0])} x {sum(one.chunks[1])} in {one.counts[0]} x {one.counts[1]} chunks"
        for one in problem.outputs
    )
    lines = [
        f"Plan: {problem.task.kind} on {len(plan.ranks)} of {len(plan.participants)} workers, engine {plan.engine}",
        *matrices,
        f"  makes     {outputs}",
        f"  method    {_method(plan)}",
        *([f"  blocks    {blocks} of up to {plan.width} columns"] if dealt else []),
        f"  work      {problem.flops:.3g} flops, {format_bytes(plan.bytes_moved)} moved between workers",
    ]
    lines += _memory_and_time(plan, "moving")
    others = [one for one in plan.alternatives if one is not plan.estimate and one.grid != plan.grid]
    if others:
        texts = [f"{one.grid[1]} worker{'s' * (one.grid[1] > 1)}: {format_time(one.seconds)}" for one in others]
        lines.append("  against   " + "\n            ".join(texts))
    return "\n".join(lines)


# Number of runs that are listed.
_LISTED = 30


def chain_text(plan: ChainPlan) -> str:
    """Return the text of the runs of a result."""
    count = len(plan.runs)
    lines = [f"Plan: {count} run{'s' * (count > 1)}" if count else "Plan: only plain tasks of Dask, no collective run"]
    lines += [f"  {number:<10}{_run_text(run)}" for number, run in enumerate(plan.runs[:_LISTED], 1)]
    lines += [f"  ...       and {count - _LISTED} more"] * (count > _LISTED)
    if plan.bytes_moved is not None:
        lines.append(f"  work      {sum(run.problem.flops for run in plan.runs):.3g} flops in the runs, ")
        lines[-1] += f"{format_bytes(plan.bytes_moved)} moved between workers"
        most = [max(run.projected_bytes.values()) for run in plan.runs if run.projected_bytes]
        lines += [f"  memory    up to {format_bytes(max(most))} a worker"] if most else []
    if plan.seconds is not None:
        lines.append(f"  time      {format_time(plan.seconds)} estimated for the runs")
    return "\n".join(lines)


def _run_text(run: Placement) -> str:
    """Return a run in one line: what it computes of which matrices, where, and how long it is expected to take."""
    problem = run.problem
    kind = "product"
    if isinstance(problem, FactorProblem | ProgramProblem):
        kind = problem.task.kind if isinstance(problem, FactorProblem) else problem.builder
    sizes = (" x ".join(map(_size, problem.chunks_of(name))) for name in problem.operands)
    text = f"{kind} of {' and '.join(sizes)}: {run.method} on {len(run.ranks)} of {len(run.participants)} workers, "
    text += f"engine {run.engine}"
    return text + (f", {format_time(run.estimate.seconds)}" if run.estimate is not None else "")


def program_text(plan: ProgramPlacement) -> str:
    """Return the text of the plan of a program."""
    problem, cost = plan.problem, plan.cost
    made = ", made by the ranks for each pass"
    matrices = [
        f"  {name.upper():10}{_size(rows)} x {sum(cols)} {problem.dtypes[name]}, {len(rows)} chunks of rows"
        + made * is_by_ranks(problem, name)
        for name, (rows, cols) in problem.chunks.items()
    ]
    outputs = ", ".join(f"{one.name} {_size(one.chunks[0])} x {_size(one.chunks[1])}" for one in problem.outputs)
    loops = [step for step in plan.steps(0) if isinstance(step, Loop)]
    expected = "turns are as many as expected" if loops else "it is well-conditioned"
    times = "once" if cost.passes == 1 else f"{cost.passes:g} times"
    lines = [
        f"Plan: {problem.builder} on {len(plan.ranks)} of {len(plan.participants)} workers, engine {plan.engine}",
        *matrices,
        f"  makes     {outputs}",
        f"  method    rows stay where they are; A is read {times} if {expected}",
        *(f"  turns     up to {loop.most} turns, {loop.expected} expected" for loop in loops),
        f"  work      {cost.flops:.3g} flops, {format_bytes(plan.bytes_moved)} moved in {cost.messages} messages",
    ]
    lines += _memory_and_time(plan, "waiting for others")
    reads = {0.0: ""}
    steps = [
        f"{line.kernel:20}{format_time(line.seconds):>12}  {line.flops:8.2g} flops{reads.get(line.passes, '  reads A')}"
        for line in cost.lines
        if line.flops or line.passes
    ]
    return "\n".join([*lines, "  steps     " + "\n            ".join(steps)])


def _size(sizes: tuple[int, ...]) -> str:
    return "?" if min(sizes) < 0 else str(sum(sizes))


def _memory_and_time(plan: FactorPlacement | ProgramPlacement, rest: str) -> list[str]:
    """Return the lines of a plan's memory and time; `rest` is what workers do when they do not compute."""
    lines = []
    if plan.projected_bytes:
        address = max(plan.projected_bytes, key=lambda key: plan.projected_bytes[key])
        lines.append(f"  memory    up to {format_bytes(plan.projected_bytes[address])} a worker ({address})")
    if plan.estimate is not None:
        seconds = [plan.estimate.seconds, plan.estimate.compute_seconds, plan.estimate.transfer_seconds]
        total, compute, transfer = map(format_time, seconds)
        lines.append(f"  time      {total} estimated: {compute} computing, {transfer} {rest}")
    return lines
