"""Plans as text: of products, waves, factorizations, programs, and results that take several runs."""

from __future__ import annotations

import math

from dask.utils import format_bytes, format_time

from dask_distmm.arrays.product import NotCollective
from dask_distmm.planning.factor import FactorPlacement, FactorProblem
from dask_distmm.planning.footprint import is_by_ranks
from dask_distmm.planning.many import BatchPlan, ChainPlan, GroupPlan, Share
from dask_distmm.planning.model import ENGINES, Estimate
from dask_distmm.planning.placement import Placement, everywhere
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import Problem
from dask_distmm.planning.program import ProgramPlacement, ProgramProblem
from dask_distmm.planning.waves import WavePlan
from dask_distmm.programs.steps import Loop

# Waves


_HOW = {
    "sums": "D stays in memory and grows, A and B are loaded along k",
    "rows": "B stays in memory, rows of A are loaded, chunks of D leave",
    "cols": "A stays in memory, columns of B are loaded, chunks of D leave",
    "blocks": "block by block of D, A and B are loaded along k for each",
    "host": "block by block of D, A and B are read from host memory for each",
}


def waves_text(made: WavePlan) -> str:
    """Return the text of a product in waves that `explain` prints."""
    problem, scheme = made.problem, made.scheme
    lines = [
        f"Plan: {len(scheme.waves)} waves, since the operands do not fit into memory together",
        f"  A         {problem.m} x {problem.k} {problem.a_dtype}",
        f"  B         {problem.k} x {problem.n} {problem.b_dtype}",
        f"  D         {problem.m} x {problem.n} {problem.dtype}",
        f"  scheme    {scheme.name}: {_HOW[scheme.name]}",
        f"  a wave    {scheme.method}: {WHAT[scheme.method]}",
        *(["  chunks    made by the ranks that multiply them, each a little ahead"] if scheme.by_ranks else []),
        f"  work      {problem.flops:.3g} flops, {format_bytes(scheme.read_bytes)} loaded",
        f"  memory    up to {format_bytes(scheme.peak_bytes)} a worker, of {format_bytes(scheme.budget_bytes)} without "
        "spilling",
        f"  time      {format_time(scheme.seconds)} estimated: {format_time(scheme.read_seconds)} loading beside "
        f"{format_time(scheme.run_seconds)} multiplying; bound by {scheme.binding}",
    ]
    return "\n".join(lines)


# Products


def _grid(grid: tuple[int, int, int]) -> str:
    return " x ".join(map(str, grid))


WHAT = {
    "local": "one worker multiplies all",
    "allgather": "each worker has a slab of one operand and gathers the other",
    "summa": "each worker has a block of D and gathers its rows of A and columns of B",
    "reducescatter": "each worker sums over its part of k, D is added up in slabs",
    "allreduce": "each worker sums over its part of k, each chunk of D is added up where it stays",
}


def plan_text(plan: Plan) -> str:
    """Return the text of a plan that `explain` prints."""
    problem = plan.problem

    def chunks(operand: str) -> str:
        nrows, ncols = problem.chunk_counts(operand)
        views = zip(("transposed", "conjugated"), (problem.transposed, problem.conjugated), strict=True)
        seen = [name for name, on in views if operand != "d" and on["ab".index(operand)]]
        return f"{nrows} x {ncols} chunks{', read ' * bool(seen)}{' and '.join(seen)}"

    rows, cols, depth = plan.block_sizes
    packed = [name.upper() for name in plan.packing]
    lines = [
        f"Plan: {plan.method} on {len(plan.ranks)} of {len(plan.participants)} workers, engine {plan.engine}",
        *([f"  @         left to Dask's own tasks under enable(): {plan.left}"] if plan.left else []),
        f"  A         {problem.m} x {problem.k} {problem.a_dtype}, {chunks('a')}",
        f"  B         {problem.k} x {problem.n} {problem.b_dtype}, {chunks('b')}",
        f"  D         {problem.m} x {problem.n} {problem.dtype}, {chunks('d')}, computed in {_computed_in(problem)}",
        *_formula(plan),
        *(f"  also      {name.upper()} on all {plan.replicas} workers, for later multiplies" for name in plan.kept),
        *_asked(problem),
        f"  method    {WHAT[plan.method]}",
        f"  grid      {_grid(plan.grid)} ranks over m x n x k, blocks up to {rows} x {cols} x {depth}",
        f"  inputs    {_placed(plan)}; packed: {', '.join(packed) or 'nothing'}",
        *_order(problem),
        f"  work      {problem.flops:.3g} flops, {format_bytes(plan.bytes_moved)} moved between workers",
    ]
    lines += ENGINES[plan.engine].describe(plan)
    if plan.projected_bytes:
        address = max(plan.projected_bytes, key=lambda key: plan.projected_bytes[key])
        limit = next(w.memory_limit for w in plan.participants if w.address == address)
        bound = f", of a limit of {format_bytes(limit)}" if limit else ""
        lines.append(f"  memory    up to {format_bytes(plan.projected_bytes[address])} a worker ({address}){bound}")
    if plan.estimate:
        lines.append(
            f"  time      {format_time(plan.estimate.seconds)} estimated: {format_time(plan.estimate.compute_seconds)} "
            f"multiplying, {format_time(plan.estimate.transfer_seconds)} moving"
        )
    if plan.by_tasks is not None and plan.estimate is not None:
        lines += _compared(plan)
    others = [e for e in plan.alternatives if e is not plan.estimate]
    if others:
        lines.append("  against   " + "\n            ".join(_against(e, plan.estimate) for e in others))
    return "\n".join(lines)


def _order(problem: Problem) -> list[str]:
    """Return the line that says along which axes chunks are taken in the order of their holders, if along any."""
    axes: set[str] = set()
    for operand in "ab" if problem.part is not None else "":
        rows, cols, _ = problem.part.of(operand)  # type: ignore[union-attr]
        named = zip({"a": "mk", "b": "kn"}[operand], (rows, cols), strict=True)
        axes |= {axis for axis, numbers in named if list(numbers) != sorted(numbers)}
    return [f"  order     chunks along {', '.join(sorted(axes))} by the workers that hold them"] if axes else []


def _placed(plan: Plan) -> str:
    texts = {
        name.upper(): "not known" if where is None else "on all workers" if everywhere(where) else "where they lie"
        for name, where in ((name, plan.where.get(name)) for name in "ab")
    }
    if texts["A"] == texts["B"]:
        return "spread evenly (not known yet)" if texts["A"] == "not known" else texts["A"]
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def _computed_in(problem: Problem) -> str:
    return f"{problem.compute_type}, {problem.compute}" if problem.compute else str(problem.compute_type)


def _formula(plan: Plan) -> list[str]:
    """Return the line with the formula, if anything is done beside the product."""
    formula = plan.problem.formula
    if formula.plain:
        return []
    alpha, beta = (complex(*x) for x in (formula.alpha, formula.beta))
    lazy = {
        name[-1]: f"{name} " if name in formula.scales else "" for name in ("scale_a", "scale_b", "scale_c", "scale_d")
    }
    text = f"{'' if alpha == 1 else f'{_number(alpha)} '}{lazy['a']}{lazy['b']}A B"
    text += f" + {_number(beta)} {lazy['c']}C" if beta else ""
    text += " + bias" if "bias" in formula.inputs else ""
    if formula.gradient:
        text = f"({text}) {formula.gradient}'({formula.inputs[0]})"
    elif formula.function:
        text = f"f({', '.join([text, *formula.names])})"
    elif formula.activation:
        text = f"{formula.activation}({text})"
    if formula.scale_d != 1 or lazy["d"]:
        text = f"{f'{_number(complex(formula.scale_d))} ' if formula.scale_d != 1 else ''}{lazy['d']}({text})"
    kept = [*formula.per_element, *([formula.operand_sum] if formula.operand_sum else [])]
    also = f"; also {', '.join(kept)}" if kept else ""
    how = "on each rank's chunks of D, before they are stored"
    engine = ENGINES[plan.engine]
    epilog = engine.native_epilog(plan)
    if epilog is not None:
        how = f"by {engine.library}'s epilog {epilog.upper()}" if epilog else f"by {engine.library}'s alpha"
    elif engine.on_gpus:
        how = "by one fused kernel on each chunk of D"
    return [f"  formula   D = {text}{also}: {how}"]


def _asked(problem: Problem) -> list[str]:
    """Return the line that says which distributions were asked for, if any were."""
    asked = [f"{name} as {x}" for name, x in zip("ABD", problem.distributions, strict=True) if x is not None]
    return [f"  asked     {', '.join(asked)}"] if asked else []


def _number(value: complex) -> str:
    return f"{value.real:g}" if not value.imag else f"({value:g})"


def _compared(plan: Plan) -> list[str]:
    """Return the seconds that Dask takes around the run and for its own tasks, and which of the two ``@`` uses."""
    assert plan.by_tasks is not None
    used = "the collective run" if plan.worth_it else "Dask's own tasks"
    rows, cols, depth = plan.by_tasks.grid
    return [
        f"  Dask      {format_time(plan.around)} around the run, {format_time(plan.seconds)} in all",
        f"            as {rows * cols * depth} products of chunks {format_time(plan.by_tasks.seconds)}; "
        f"under enable() @ uses {used}",
    ]


def _against(estimate: Estimate, chosen: Estimate | None) -> str:
    text = f"{estimate.method} {_grid(estimate.grid)}: {format_time(estimate.seconds)}"
    text += f", {format_bytes(estimate.bytes_moved)} moved, {format_bytes(estimate.peak_bytes)} a worker"
    if chosen and estimate.seconds < chosen.seconds:
        text += " (too much memory)"
    return text


BATCH_ROUTES = {"items": "whole items in plain tasks", "collective": "collective runs"}


def batch_text(plan: BatchPlan) -> str:
    """Return the text of the plan for a batch."""
    batch = plan.batch
    lines = [
        f"Batch: {BATCH_ROUTES[plan.route]}",
        f"  items     {batch.count} ({' x '.join(map(str, batch.shape))}) of "
        f"{batch.m} x {batch.k} {batch.a_dtype} by {batch.k} x {batch.n} {batch.b_dtype}, "
        f"computed in {batch.compute_type}",
        f"  work      {batch.flops * batch.count:.3g} flops",
        f"  why       {plan.reason}",
    ]
    blocks = math.prod(map(len, plan.chunks))
    known = {"items": plan.items, "collective": plan.collective}
    for name, estimate in sorted(known.items(), key=lambda pair: pair[0] != plan.route):
        if estimate is None:
            continue
        cut = (
            f"{blocks} tasks of up to {format_bytes(estimate.task_bytes)}"
            if name == "items"
            else f"{estimate.runs} run{'s' * (estimate.runs > 1)}"
        )
        lines.append(
            f"  {'time' if name == plan.route else 'against':<10}{name}: {format_time(estimate.seconds)} estimated: "
            f"{format_time(estimate.compute_seconds)} multiplying, {format_time(estimate.transfer_seconds)} moving, "
            f"{format_time(estimate.overhead_seconds)} for tasks; {cut}"
        )
    if plan.route == "collective" and plan.plan is not None:
        lines.append("  each run  " + repr(plan.plan).replace("\n", "\n            "))
    return "\n".join(lines)


def group_text(plan: GroupPlan) -> str:
    """Return the text of the plan for a group."""
    found = [share for share in plan.shares if share is not None]
    runs = sum(share.collective for share in found)
    tasks = sum(len(share.rows) for share in found)
    lines = [
        f"Group: {len(plan.shapes)} products, {runs} by collective runs, {len(found) - runs} by plain tasks (in all "
        f"{tasks}); {format_time(plan.seconds)} estimated on {plan.slots} slots"
    ]
    for number, ((m, n, k), share) in enumerate(zip(plan.shapes, plan.shares, strict=True)):
        lines.append(f"  {number:<9} {m} x {k} by {k} x {n}: {in_words(share)}")
    return "\n".join(lines)


def in_words(share: Share | None) -> str:
    """Return the text for one product of a group."""
    if share is None:
        return "by Dask's own function"
    if share.collective:
        return f"a collective run, {format_time(share.seconds)}"
    slabs = f"{len(share.rows)} slabs of up to {max(share.rows)} rows" if len(share.rows) > 1 else "whole"
    return f"{slabs}, {format_time(share.seconds)} a task, place {share.rank} in the order"


def reason_text(made: NotCollective) -> str:
    """Return the text that `dask_distmm.explain` prints where Dask's own function would run."""
    return f"Dask's own matmul would run: {made.reason}"


# Factorizations, programs, several runs


_WHAT = {
    "local": "one worker has the whole matrix",
    "host": "one worker has the whole matrix; LAPACK on its host computes, or cuSOLVER where it can",
    "columns": "block columns on all workers; the owner of a panel factorizes it, others fetch it",
    "eigh": "block columns on all workers, which reduce the matrix to a tridiagonal one, and divide that",
}


def _method(plan: FactorPlacement) -> str:
    if plan.shared:
        return _WHAT["eigh"]
    if plan.collective:
        return f"block columns on all workers, which compute together by {ENGINES[plan.engine].library}"
    task = plan.problem.task
    by_host = ENGINES[plan.engine].on_gpus and task.spectral and task.decomposition.on_host
    return _WHAT["host" if by_host else plan.method]


def factor_text(plan: FactorPlacement) -> str:
    """Return the text of a plan."""
    problem = plan.problem
    blocks = sum(matrix.count for matrix in plan.columns.matrices)
    dealt = plan.sweeps or plan.collective or plan.shared
    matrices = [
        f"  {name.upper():10}{sum(rows)} x {sum(cols)} {problem.task.dtype}, {len(rows)} x {len(cols)} chunks"
        for name, (rows, cols) in problem.chunks.items()
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
    steps = [
        f"{line.kernel:20}{format_time(line.seconds):>12}  {line.flops:8.2g} flops" + "  reads A" * bool(line.reads)
        for line in cost.lines
        if line.flops or line.reads
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
