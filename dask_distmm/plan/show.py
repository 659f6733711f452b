"""A Plan as text."""

from __future__ import annotations

from dask_distmm.plan.native import native_epilog
from dask_distmm.plan.plan import Estimate, Plan, everywhere
from dask_distmm.plan.problem import Problem
from dask_distmm.plan.pulls import native, step_of, walks

__all__ = ["WHAT", "plan_text", "size_text", "time_text"]


def size_text(size: float) -> str:
    """Return bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def time_text(seconds: float) -> str:
    """Return seconds in a readable unit."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _grid(grid: tuple[int, int, int]) -> str:
    return " x ".join(map(str, grid))


WHAT = {
    "local": "one worker multiplies alone",
    "allgather": "each worker has a slab of one operand and gathers the other",
    "summa": "each worker has a block of D and gathers its rows of A and columns of B",
    "reducescatter": "each worker sums over its part of k, D is added up in slabs",
    "allreduce": "each worker sums over its part of k, each chunk of D is added up where it stays",
}


def plan_text(plan: Plan) -> str:
    """Return what `explain` prints."""
    problem = plan.problem

    def chunks(operand: str) -> str:
        nrows, ncols = problem.chunk_counts(operand)
        views = zip(("transposed", "conjugated"), (problem.turned, problem.conjugated), strict=True)
        seen = [name for name, on in views if operand != "d" and on["ab".index(operand)]]
        return f"{nrows} x {ncols} chunks{', read ' * bool(seen)}{' and '.join(seen)}"

    rows, cols, depth = plan.block_sizes
    packed = [name for name, on in zip("ABD", (plan.packing.a, plan.packing.b, plan.packing.d), strict=True) if on]
    lines = [
        f"Plan: {plan.method} on {len(plan.ranks)} of {len(plan.participants)} workers, engine {plan.engine}",
        f"  A         {problem.m} x {problem.k} {problem.a_dtype}, {chunks('a')}",
        f"  B         {problem.k} x {problem.n} {problem.b_dtype}, {chunks('b')}",
        f"  D         {problem.m} x {problem.n} {problem.dtype}, {chunks('d')}, computed in {_computed_in(problem)}",
        *_formula(plan),
        *([f"  also      D on all {plan.replicas} workers, for later multiplies"] if plan.replicas else []),
        *_asked(problem),
        f"  method    {WHAT[plan.method]}",
        f"  grid      {_grid(plan.grid)} ranks over m x n x k, blocks up to {rows} x {cols} x {depth}",
        f"  inputs    {_placed(plan)}; packed: {', '.join(packed) or 'nothing'}",
        *_order(problem),
        f"  work      {problem.flops:.3g} flops, {size_text(plan.bytes_moved)} moved between workers",
    ]
    if plan.engine == "peer":
        lines.append(f"  pulls     {_pulls(plan)}")
    if plan.projected_bytes:
        address = max(plan.projected_bytes, key=lambda key: plan.projected_bytes[key])
        limit = next(w.memory_limit for w in plan.participants if w.address == address)
        bound = f", of a limit of {size_text(limit)}" if limit else ""
        lines.append(f"  memory    up to {size_text(plan.projected_bytes[address])} a worker ({address}){bound}")
    if plan.estimate:
        lines.append(
            f"  time      {time_text(plan.estimate.seconds)} estimated: {time_text(plan.estimate.compute_seconds)} "
            f"multiplying, {time_text(plan.estimate.transfer_seconds)} moving"
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
        name: "not known" if where is None else "on all workers" if everywhere(where) else "where they lie"
        for name, where in (("A", plan.where_a), ("B", plan.where_b))
    }
    if texts["A"] == texts["B"]:
        return "spread evenly (not known yet)" if texts["A"] == "not known" else texts["A"]
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def _pulls(plan: Plan) -> str:
    """Say what the rank with most buffers holds, and what passes by."""
    walk = max(walks(plan), key=lambda one: one.buffer_bytes)
    names, what = ("A", "B")[:: -1 if walk.held else 1], ("rows", "columns")[:: 1 if walk.held else -1]
    parts, depth = len(walk.parts) - 1, len(walk.depth) - 1
    cut = f" in {parts} x {depth} parts" if parts * depth > 1 else ""
    lies = " as it lies" if walk.lies[walk.held] and not walk.held_bytes else ""
    padded = "; padded to multiples of 16, which GEMMs are quick with" if step_of(plan.problem) > 1 else ""
    return (
        f"{names[0]} held{cut}{lies}, {names[1]} in panels of up to {walk.width} {what[0]}; "
        f"buffers of {size_text(walk.buffer_bytes)}{padded}"
    )


def _computed_in(problem: Problem) -> str:
    return f"{problem.compute_type}, {problem.compute}" if problem.compute else str(problem.compute_type)


def _formula(plan: Plan) -> list[str]:
    """Return the line that says what is done beside the product, if anything is."""
    spec = plan.problem.finish
    if spec.plain:
        return []
    alpha, beta = (complex(*x) for x in (spec.alpha, spec.beta))
    lazy = {
        name[-1]: f"{name} " if name in spec.scales else "" for name in ("scale_a", "scale_b", "scale_c", "scale_d")
    }
    text = f"{'' if alpha == 1 else f'{_number(alpha)} '}{lazy['a']}{lazy['b']}A B"
    text += f" + {_number(beta)} {lazy['c']}C" if beta else ""
    text += " + bias" if "bias" in spec.inputs else ""
    if spec.gradient:
        text = f"({text}) {spec.gradient}'({spec.inputs[0]})"
    elif spec.function:
        text = f"f({', '.join([text, *spec.names])})"
    elif spec.activation:
        text = f"{spec.activation}({text})"
    if spec.scale_d != 1 or lazy["d"]:
        text = f"{f'{_number(complex(spec.scale_d))} ' if spec.scale_d != 1 else ''}{lazy['d']}({text})"
    kept = [*spec.per_element, *([spec.operand_sum] if spec.operand_sum else [])]
    also = f"; also {', '.join(kept)}" if kept else ""
    how = "on each rank's chunks of D, before they are stored"
    library = "cuBLASMp" if plan.engine == "cublasmp" else "cuBLASLt"
    epilog = native(plan, walks(plan)) if plan.engine == "peer" else native_epilog(plan)
    if epilog is not None:
        how = f"by {library}'s epilog {epilog.upper()}" if epilog else f"by {library}'s alpha"
    elif plan.engine != "numpy":
        how = "by one fused kernel on each chunk of D"
    return [f"  formula   D = {text}{also}: {how}"]


def _asked(problem: Problem) -> list[str]:
    """Return the line that says which distributions were asked for, if any were."""
    asked = [f"{name} as {x}" for name, x in zip("ABD", problem.distributions, strict=True) if x is not None]
    return [f"  asked     {', '.join(asked)}"] if asked else []


def _number(value: complex) -> str:
    return f"{value.real:g}" if not value.imag else f"({value:g})"


def _compared(plan: Plan) -> list[str]:
    """Say what Dask takes around the run, what its own tasks would take, and which of the two ``@`` takes."""
    assert plan.by_tasks is not None
    taken = "the run" if plan.worth_it else "Dask's own tasks"
    rows, cols, depth = plan.by_tasks.grid
    return [
        f"  Dask      {time_text(plan.around)} around the run, {time_text(plan.expected)} in all",
        f"            as {rows * cols * depth} products of chunks {time_text(plan.by_tasks.seconds)}; "
        f"under enable() @ takes {taken}",
    ]


def _against(estimate: Estimate, chosen: Estimate | None) -> str:
    text = f"{estimate.method} {_grid(estimate.grid)}: {time_text(estimate.seconds)}"
    text += f", {size_text(estimate.bytes_moved)} moved, {size_text(estimate.peak_bytes)} a worker"
    if chosen and estimate.seconds < chosen.seconds:
        text += " (too much memory)"
    return text
