"""Plans as text: of products, waves, factorizations, programs, and results that take several runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from dask.utils import format_bytes, format_time

from dask_distmm.planning.computation import Chunks, NamedMatrix
from dask_distmm.planning.factor import FactorPlacement, FactorProblem
from dask_distmm.planning.many import BatchPlan, ChainPlan, GroupPlan, Share
from dask_distmm.planning.model import ENGINES, Estimate
from dask_distmm.planning.placement import CLEARLY, Placement, everywhere
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.problem import Problem
from dask_distmm.planning.program import ProgramPlacement, ProgramProblem
from dask_distmm.planning.region import Region
from dask_distmm.planning.waves import WavePlan
from dask_distmm.programs.steps import Loop
from dask_distmm.tracing.place import Row

# Waves


_HOW = {
    "sums": "D stays in memory and grows, A and B are loaded along k",
    "rows": "B stays in memory, rows of A are loaded, chunks of D leave",
    "cols": "A stays in memory, columns of B are loaded, chunks of D leave",
    "blocks": "block by block of D, A and B are loaded along k for each",
    "host": "block by block of D, A and B are read from host memory for each",
}


def listed(head: str, *facts: tuple[object, str]) -> str:
    """Return a first line, and below it facts, each beside its title; those that are empty are left out."""
    indent = "\n" + " " * 12
    return "\n".join([head, *(f"  {title!s:<10}" + fact.replace("\n", indent) for title, fact in facts if fact)])


def _verdict(plan: Plan | WavePlan) -> str:
    """Return the line that says what ``@`` does with a product; empty where that was not asked."""
    if plan.left is None:
        return ""
    if plan.left:
        return f"A @ B under enable(): Dask's own tasks, as {plan.left}\n"
    how = "a collective run" if isinstance(plan, Plan) else "waves of collective runs"
    text = f"A @ B under enable(): {how}, {format_time(plan.seconds)} expected"
    if isinstance(plan, Plan) and (own := plan.by_tasks) is not None:
        text += f"; Dask's own tasks {format_time(own.seconds)} (a run has to take at most {CLEARLY:.0%} of that)"
    return f"{text}\n"


def plan_line(plan: Plan) -> str:
    """Return the method and who multiplies."""
    return f"Plan: {plan.method} {on_workers(plan)}"


def waves_text(plan: WavePlan) -> str:
    """Return the text of a product in waves that `explain` prints."""
    problem, scheme = plan.problem, plan.scheme
    return listed(
        f"{_verdict(plan)}Plan: {scheme.count} waves, since the operands do not fit into memory together",
        *((name.upper(), f"{_sizes(problem[name].chunks)} {problem[name].dtype}") for name in "abd"),
        ("scheme", f"{scheme.name}: {_HOW[scheme.name]}"),
        ("a wave", f"{scheme.method}: {WHAT[scheme.method]}"),
        ("chunks", "made by the ranks that multiply them, each a little ahead" * scheme.by_ranks),
        ("work", f"{problem.flops:.3g} flops, {format_bytes(scheme.read_bytes)} loaded"),
        ("memory", f"{_up_to(scheme.peak_bytes)}, of {format_bytes(scheme.budget_bytes)} without spilling"),
        (
            "time",
            f"{format_time(scheme.seconds)} estimated: {format_time(scheme.read_seconds)} loading beside "
            f"{format_time(scheme.run_seconds)} multiplying; bound by {scheme.binding}",
        ),
    )


# Products


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


WHAT = {
    "local": "one worker multiplies all",
    "allgather": "each worker has a slab of one operand and gathers the other",
    "summa": "each worker has a block of D and gathers its rows of A and columns of B",
    "reducescatter": "each worker sums over its part of k, D is added up in slabs",
    "allreduce": "each worker sums over its part of k, each chunk of D is added up where it stays",
}


def plan_text(plan: Plan) -> str:
    """Return the text of a plan that `explain` prints."""
    problem, (rows, cols, depth) = plan.problem, plan.block_sizes
    packed = ", ".join(name.upper() for name in plan.packing) or "nothing"
    rejected = [e for e in plan.alternatives if e is not plan.estimate]
    return listed(
        f"{_verdict(plan)}{plan_line(plan)}",
        ("A", _matrix(problem.a)),
        ("B", _matrix(problem.b)),
        ("D", f"{_matrix(problem.d)}, computed in {problem.compute_type}{problem.compute and f', {problem.compute}'}"),
        ("formula", _formula(plan)),
        *(("also", f"{name.upper()} on all {plan.replicas} workers, for later multiplies") for name in plan.kept),
        ("asked", ", ".join(f"{x} as {y}" for x, y in zip("ABD", problem.distributions, strict=True) if y is not None)),
        ("method", WHAT[plan.method]),
        ("grid", f"{_by(plan.grid)} ranks over m x n x k, blocks up to {rows} x {cols} x {depth}"),
        ("inputs", f"{_placed(plan)}; packed: {packed}"),
        ("order", _order(problem)),
        ("work", f"{problem.flops:.3g} flops, {format_bytes(plan.bytes_moved)} moved between workers"),
        *ENGINES[plan.engine].describe(plan),
        ("memory", _memory(plan)),
        ("time", _time(plan.estimate, "multiplying", "moving")),
        ("Dask", _compared(plan)),
        ("against", "\n".join(_against(e, plan.estimate) for e in rejected)),
    )


def _order(problem: Problem) -> str:
    """Return along which axes chunks are taken in the order of their holders, if along any."""
    axes: set[str] = set()
    for operand in "ab":
        rows, cols, _ = problem[operand].in_whole
        named = zip({"a": "mk", "b": "kn"}[operand], (rows, cols), strict=True)
        axes |= {axis for axis, numbers in named if list(numbers) != sorted(numbers)}
    return f"chunks along {', '.join(sorted(axes))} by the workers that hold them" if axes else ""


def _placed(plan: Plan) -> str:
    texts = {
        name.upper(): "not known" if where is None else "on all workers" if everywhere(where) else "where they lie"
        for name, where in ((name, plan.where.get(name)) for name in "ab")
    }
    if texts["A"] == texts["B"]:
        return "spread evenly (not known yet)" if texts["A"] == "not known" else texts["A"]
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def _formula(plan: Plan) -> str:
    """Return the formula, if anything is done beside the product."""
    formula = plan.problem.formula
    if formula.plain:
        return ""
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
    return f"D = {text}{also}: {how}"


def _number(value: complex) -> str:
    return f"{value.real:g}" if not value.imag else f"({value:g})"


def _compared(plan: Plan) -> str:
    """Return the seconds that Dask takes around the run, and for its own tasks."""
    if plan.by_tasks is None or plan.estimate is None:
        return ""
    return (
        f"{format_time(plan.around)} around the run, {format_time(plan.seconds)} in all\n"
        f"as {math.prod(plan.by_tasks.grid)} products of chunks {format_time(plan.by_tasks.seconds)}"
    )


def _against(estimate: Estimate, chosen: Estimate | None) -> str:
    text = f"{estimate.method} {_by(estimate.grid)}: {format_time(estimate.seconds)}"
    text += f", {format_bytes(estimate.bytes_moved)} moved, {format_bytes(estimate.peak_bytes)} a worker"
    if chosen and estimate.seconds < chosen.seconds:
        text += " (too much memory)"
    return text


BATCH_ROUTES = {"items": "whole items in plain tasks", "collective": "collective runs"}


def batch_text(plan: BatchPlan) -> str:
    """Return the text of the plan for a batch."""
    batch = plan.batch
    times = []
    for name in sorted(BATCH_ROUTES, key=lambda name: name != plan.route):
        if (estimate := plan.items if name == "items" else plan.collective) is not None:
            count = estimate.grid[0]
            tasks = f"{count} tasks of up to {format_bytes(estimate.peak_bytes)}"
            cut = tasks if name == "items" else f"{count} run{'s' * (count > 1)}"
            time = _time(estimate, "multiplying", "moving")
            text = f"{name}: {time}, {format_time(estimate.rest_seconds)} for tasks; {cut}"
            times.append(("time" if name == plan.route else "against", text))
    return listed(
        f"Batch: {BATCH_ROUTES[plan.route]}",
        (
            "items",
            f"{batch.count} ({_by(batch.shape)}) of {batch.m} x {batch.k} {batch.a_dtype} by "
            f"{batch.k} x {batch.n} {batch.b_dtype}, computed in {batch.compute_type}",
        ),
        ("work", f"{batch.flops * batch.count:.3g} flops"),
        ("why", plan.reason),
        *times,
        ("each run", repr(plan.plan) if plan.route == "collective" and plan.plan is not None else ""),
    )


def group_text(plan: GroupPlan) -> str:
    """Return the text of the plan for a group."""
    shares = [share for share in plan.shares if share is not None]
    runs = sum(share.collective for share in shares)
    products = enumerate(zip(plan.shapes, plan.shares, strict=True))
    return listed(
        f"Group: {len(plan.shapes)} products, {runs} by collective runs, {len(shares) - runs} by plain tasks (in all "
        f"{sum(len(share.rows) for share in shares)}); {format_time(plan.seconds)} estimated on {plan.slots} slots",
        *((number, f"{m} x {k} by {k} x {n}: {in_words(share)}") for number, ((m, n, k), share) in products),
    )


def in_words(share: Share | None) -> str:
    """Return the text for one product of a group."""
    if share is None:
        return "by Dask's own function"
    if share.collective:
        return f"a collective run, {format_time(share.seconds)}"
    slabs = f"{len(share.rows)} slabs of up to {max(share.rows)} rows" if len(share.rows) > 1 else "whole"
    return f"{slabs}, {format_time(share.seconds)} a task, place {share.rank} in the order"


# Factorizations, programs, several runs


_WHAT = {
    "local": "one worker has the whole matrix",
    "host": "one worker has the whole matrix; LAPACK on its host computes, or cuSOLVER where it can",
    "columns": "block columns on all workers; the owner of a panel factorizes it, the others get it",
    "eigh": "block columns on all workers, which reduce the matrix to a tridiagonal one, and divide that",
}


def _method(plan: FactorPlacement) -> str:
    if plan.shared:
        return _WHAT["eigh"]
    task = plan.problem.task
    by_host = ENGINES[plan.engine].on_gpus and task.entry.on_host
    return _WHAT["host" if by_host else plan.method]


def _refined(plan: FactorPlacement) -> str:
    """Return what becomes of a solution by factors of fewer bits, and what it takes without them."""
    if (plain := plan.plain) is None:
        return ""
    task = plan.problem.task
    fallback = f"else factors in {task.dtype}" if plan.exact else f"no memory for factors in {task.dtype}"
    by = "" if task.factor_dtype == "float32" else f", products in {task.factor_dtype}"
    way = f"factors in {task.dtype_of_factors}{by}, refined in {task.dtype}; {fallback}"
    return f"{way}\nwithout factor_dtype: {format_time(plain.seconds)}, {_up_to(plain.peak_bytes)}"


def factor_text(plan: FactorPlacement) -> str:
    """Return the text of a plan."""
    problem = plan.problem
    blocks = sum(matrix.count for matrix in plan.columns.matrices)
    rest = [e for e in plan.alternatives if e is not plan.estimate and e.grid != plan.grid]
    return listed(
        f"Plan: {problem.task.kind} {on_workers(plan)}",
        *((x.name.upper(), _matrix(x, problem.task.dtype)) for x in problem.matrices),
        (
            "makes",
            ", ".join(f"{x.name} {_sizes(x.chunks)} in {_by(x.counts)} chunks" for x in problem.outputs),
        ),
        ("method", _method(plan)),
        ("types", _refined(plan)),
        ("blocks", f"{blocks} of up to {plan.width} columns" * bool(plan.sweeps or plan.shared)),
        ("work", f"{problem.flops:.3g} flops, {format_bytes(plan.bytes_moved)} moved between workers"),
        ("memory", _memory(plan)),
        ("time", _time(plan.estimate, "computing", "moving")),
        ("against", "\n".join(f"{x.grid[1]} worker{'s' * (x.grid[1] > 1)}: {format_time(x.seconds)}" for x in rest)),
    )


# Number of runs that are listed.
_LISTED = 30


def chain_text(plan: ChainPlan) -> str:
    """Return the text of the runs of a result."""
    count = len(plan.runs)
    most = [max(run.projected_bytes.values()) for run in plan.runs if run.projected_bytes]
    flops = sum(run.problem.flops for run in plan.runs)
    own = sum(region.chosen for region in plan.regions)
    numbers = ((count, "run"), (own, "region"))
    every = [f"{number} {what}{'s' * (number > 1)}" for number, what in numbers if number]
    return listed(
        f"Plan: {', '.join(every)}" if every else "Plan: only plain tasks of Dask, no collective run",
        *(("region", _region_text(region)) for region in plan.regions),
        ("left", "; ".join(f"{number} tasks: {why}" for why, number in plan.left.items())),
        *((number, _run_text(run)) for number, run in enumerate(plan.runs[:_LISTED], 1)),
        ("...", f"and {count - _LISTED} more" * (count > _LISTED)),
        (
            "work",
            f"{flops:.3g} flops in the runs, {format_bytes(plan.bytes_moved or 0)} moved between workers" * bool(count),
        ),
        ("memory", _up_to(max(most)) if most else ""),
        ("time", f"{format_time(plan.seconds)} estimated for the runs" if plan.seconds is not None else ""),
    )


def _region_text(region: Region) -> str:
    """Return what a region has, and what the choice rests on."""
    names = ", ".join(f"{number} {name}" for name, number in region.counts.items())
    work, run, own = map(format_time, region.seconds)
    return (
        f"{'one run' if region.chosen else 'tasks of Dask'}: {work} of work take {run} more in a run, {own} more as "
        f"tasks\n{region.inputs} chunks are there, {region.outputs} are made by {names}"
    )


def _run_text(run: Placement) -> str:
    """Return a run in one line: what it computes of which matrices, where, and how long it is expected to take."""
    problem = run.problem
    kind = "product"
    if isinstance(problem, FactorProblem | ProgramProblem):
        kind = problem.task.kind if isinstance(problem, FactorProblem) else problem.builder
    text = f"{kind} of {' and '.join(_sizes(problem[name].chunks) for name in problem.operands)}: {run.method} "
    return text + on_workers(run) + (f", {format_time(run.estimate.seconds)}" if run.estimate is not None else "")


def program_text(plan: ProgramPlacement) -> str:
    """Return the text of the plan of a program."""
    problem, cost = plan.problem, plan.cost
    loops = [step for step in plan.steps(0) if isinstance(step, Loop)]
    expected = "turns are as many as expected" if loops else "it is well-conditioned"
    times, by_ranks = "once" if cost.passes == 1 else f"{cost.passes:g} times", ", made by the ranks for each pass"
    steps = [
        f"{line.kernel:20}{format_time(line.seconds):>12}  {line.flops:8.2g} flops" + "  reads A" * bool(line.reads)
        for line in cost.lines
        if line.flops or line.reads
    ]
    return listed(
        f"Plan: {problem.title} {on_workers(plan)}",
        *(
            (x.name.upper(), f"{_sizes(x.chunks)} {x.dtype}, {x.counts[0]} chunks of rows{by_ranks * x.by_ranks}")
            for x in problem.matrices
        ),
        ("makes", ", ".join(f"{output.name} {_sizes(output.chunks)}" for output in problem.outputs)),
        ("method", f"rows stay where they are; A is read {times} if {expected}"),
        *(("turns", f"{loop.expected} turns expected") for loop in loops),
        ("work", f"{cost.flops:.3g} flops, {format_bytes(plan.bytes_moved)} moved in {cost.messages} messages"),
        ("memory", _memory(plan)),
        ("time", _time(plan.estimate, "computing", "waiting for others")),
        ("steps", "\n".join(steps)),
        ("source", "\n".join(_statements(problem))),
    )


def _statements(problem: ProgramProblem) -> Iterator[str]:
    """Yield the statements of a traced function, below the lines of its source."""
    before = ""
    for row in problem.statements:
        indent = "  " * row.depth
        if row.line != before:
            yield f"{indent}{{}}    # {{}}".format(*source_of(row))
        before = row.line
        moved = f", {format_bytes(row.moved)} of each other rank" if row.moved else ""
        yield f"{indent}  {row.what:24}{row.kind:28}{row.where}{moved}".rstrip()


def source_of(row: Row) -> tuple[str, str]:
    """Return the text of a statement's line, and the name of its file with the number of the line."""
    match = re.fullmatch(r"(?:.*[/\\])?(.*?:\d+): (.*)", row.line)
    return (match[2], match[1]) if match else (row.line, "")


# Parts that several have


def on_workers(plan: Placement) -> str:
    """Return how many workers compute, and by which engine."""
    return f"on {len(plan.ranks)} of {len(plan.participants)} workers, engine {plan.engine}"


def _matrix(operand: NamedMatrix, dtype: str = "") -> str:
    """Return the extents, the type and the chunks of a matrix, and how these are read."""
    seen = " and ".join(name for name in ("transposed", "conjugated") if getattr(operand, name))
    return f"{_sizes(operand.chunks)} {dtype or operand.dtype}, {_by(operand.counts)} chunks{seen and f', read {seen}'}"


def _sizes(chunks: Chunks) -> str:
    """Return the extents of a matrix; those that are not known are question marks."""
    return " x ".join("?" if min(sizes) < 0 else str(sum(sizes)) for sizes in chunks)


def _up_to(size: float) -> str:
    return f"up to {format_bytes(size)} a worker"


def _memory(plan: Placement) -> str:
    """Return the bytes of the worker that holds most."""
    if not plan.projected_bytes:
        return ""
    address = max(plan.projected_bytes, key=lambda key: plan.projected_bytes[key])
    limit = next(worker.memory_limit for worker in plan.participants if worker.address == address)
    bound = f", of a limit of {format_bytes(limit)}" if limit else ""
    return f"{_up_to(plan.projected_bytes[address])} ({address}){bound}"


def _time(estimate: Estimate | None, doing: str, rest: str) -> str:
    """Return an estimate: what workers do, and what they do the rest of the time."""
    if estimate is None:
        return ""
    seconds = estimate.seconds, estimate.compute_seconds, estimate.transfer_seconds
    return "{} estimated: {} {doing}, {} {rest}".format(*map(format_time, seconds), doing=doing, rest=rest)
