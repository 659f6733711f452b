"""A Plan as HTML, for notebooks: where chunks lie, which rank multiplies them, the alternatives, the memory. Pure.

Text and lines have the page's own colour (``currentColor``). Workers have the colours of Okabe and Ito that black
letters can be read on, told apart with most kinds of colour blindness; whatever is coloured is labelled too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence, Sized
from html import escape

import numpy as np
from dask.utils import format_bytes, format_time
from numpy.typing import NDArray

from dask_distmm.planning.cublasmp import Tile
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.planning.many import BatchEstimate, BatchPlan, ChainPlan, GroupPlan
from dask_distmm.planning.model import ENGINES, Estimate
from dask_distmm.planning.placement import Placement
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.program import ProgramPlacement
from dask_distmm.planning.waves import WavePlan
from dask_distmm.programs.check import Span
from dask_distmm.programs.steps import Loop
from dask_distmm.show.text import BATCH_ROUTES, WHAT, in_words

# Matrices and bars as inline SVG: no script, no style sheet, readable on light and on dark pages. Pure


_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#BBBBBB")
_NOBODY = "#DDDDDD"
_LONGEST, _SHORTEST, _GAP, _TITLE = 210.0, 46.0, 26.0, 18.0
_MOST_PARTS = 24


def colour(number: int | None) -> str:
    """Return the colour of a rank; None is for no rank in particular."""
    return _NOBODY if number is None else _COLOURS[number % len(_COLOURS)]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A part of a matrix."""

    # Where it begins and ends.
    rows: tuple[int, int]
    cols: tuple[int, int]
    # The ranks that have it; none for no rank in particular.
    ranks: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The text inside of it."""
        ranks = self.ranks
        if len(ranks) > 3 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
            return f"{ranks[0]}\N{EN DASH}{ranks[-1]}"
        return ", ".join(map(str, ranks[:4])) + ("\N{HORIZONTAL ELLIPSIS}" if len(ranks) > 4 else "")


@dataclasses.dataclass(frozen=True)
class DrawnMatrix:
    """A matrix to be drawn."""

    # The text above it.
    name: str
    caption: str
    # Rows and columns.
    shape: tuple[int, int]
    # Its coloured parts.
    cells: Sequence[Cell]
    # Where lines are drawn: the edges of its chunks.
    row_edges: Sequence[int] = ()
    col_edges: Sequence[int] = ()


def coarse(edges: Sequence[int]) -> tuple[list[int], int]:
    """Return few enough edges to be drawn, of those that there are, and which of how many were taken."""
    step = -(-(len(edges) - 1) // _MOST_PARTS) if len(edges) > 1 else 1
    return [*edges[:-1:step], edges[-1]], step


def _decimal(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text_line(
    x: float,
    y: float,
    content: str,
    *,
    size: int = 12,
    anchor: str = "start",
    fill: str = "currentColor",
    bold: bool = False,
) -> str:
    """Return a line of text."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{_decimal(x)}" y="{_decimal(y)}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>'
        f"{escape(content)}</text>"
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{_decimal(x)}" y="{_decimal(y)}" width="{_decimal(width)}" height="{_decimal(height)}" '
        f'fill="{fill}"{more}/>'
    )


def figure(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """Return a whole SVG; `label` describes it to those who can't see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_decimal(width)}" height="{_decimal(height)}" '
        f'viewBox="0 0 {_decimal(width)} {_decimal(height)}" role="img" aria-label="{escape(label, quote=True)}" '
        f'font-family="sans-serif" style="max-width: 100%">{"".join(parts)}</svg>'
    )


def _drawn(matrix: DrawnMatrix, x: float, y: float, width: float, height: float) -> list[str]:
    """Return a matrix at a place."""
    nrows, ncols = matrix.shape

    def across(column: int) -> float:
        return x + width * column / ncols

    def down(row: int) -> float:
        return y + height * row / nrows

    after = x + 9 + 7.2 * len(matrix.name)
    parts = [text_line(x, y - 5, matrix.name, bold=True), text_line(after, y - 5, matrix.caption, size=11)]
    labels = []
    for cell in matrix.cells:
        left, right, top, bottom = across(cell.cols[0]), across(cell.cols[1]), down(cell.rows[0]), down(cell.rows[1])
        # A tile that several ranks share is striped in their colours.
        stripes = cell.ranks[:8] or (None,)
        wide = (right - left) / len(stripes)
        parts += [_rect(left + at * wide, top, wide, bottom - top, colour(rank)) for at, rank in enumerate(stripes)]
        size = min(12, int(bottom - top) - 2)
        if size >= 7 and len(cell.label) * 0.62 * size <= right - left - 3:
            middle = (top + bottom) / 2 + size / 3
            labels.append(text_line((left + right) / 2, middle, cell.label, size=size, anchor="middle", fill="#000"))
        parts.append(_rect(left, top, right - left, bottom - top, "none", ' stroke="#000" stroke-width="0.8"'))
    lines = "".join(f"M{_decimal(x)} {_decimal(down(edge))}h{_decimal(width)}" for edge in matrix.row_edges[1:-1])
    lines += "".join(f"M{_decimal(across(edge))} {_decimal(y)}v{_decimal(height)}" for edge in matrix.col_edges[1:-1])
    if lines:
        parts.append(
            f'<path d="{lines}" stroke="#000" stroke-opacity="0.35" stroke-width="0.8" stroke-dasharray="3 2"/>'
        )
    return [*parts, *labels, _rect(x, y, width, height, "none", ' stroke="currentColor" stroke-width="1.2"')]


def product_diagram(a: DrawnMatrix, b: DrawnMatrix, d: DrawnMatrix, label: str) -> str:
    """Return A to the left of D and B above it, as they meet in the product."""
    (m, k), n = a.shape, b.shape[1]
    longest = max(m, n, k)
    height, width, depth = (max(_SHORTEST, _LONGEST * length / longest) for length in (m, n, k))
    # Captions are longer than narrow matrices are wide.
    left, caption = max(depth, 150.0), 170.0
    x, y = left + _GAP, _TITLE + depth + _GAP + _TITLE
    parts = [*_drawn(b, x, _TITLE, width, depth), *_drawn(a, 2, y, depth, height), *_drawn(d, x, y, width, height)]
    return figure(x + max(width, caption) + 4, y + height + 4, label, parts)


@dataclasses.dataclass(frozen=True)
class Bar:
    """A line of a bar chart."""

    # The text before and after it.
    name: str
    note: str
    # Of its parts, one after the other.
    lengths: Sequence[float]
    # Colours of its parts.
    fills: Sequence[str]
    # Where a line is drawn across it; None for none.
    mark: float | None = None
    # Whether it is the one that counts.
    bold: bool = False


def bar_chart(rows: Sequence[Bar], label: str) -> str:
    """Return a bar chart."""
    most = max((max(sum(row.lengths), row.mark or 0) for row in rows), default=0) or 1
    name = 12 + 7.2 * max(len(row.name) for row in rows)
    long, note = 220.0, 16 + 6.6 * max(len(row.note) for row in rows)
    parts = []
    for at, row in enumerate(rows):
        y, x = 20.0 * at, name
        parts.append(text_line(0, y + 14, row.name, bold=row.bold))
        for length, fill in zip(row.lengths, row.fills, strict=True):
            parts.append(_rect(x, y + 3, long * length / most, 14, fill))
            x += long * length / most
        outline = ' stroke="currentColor" stroke-width="0.8"'
        parts.append(_rect(name, y + 3, x - name, 14, "none", outline))
        if row.mark is not None:
            x = max(x, name + long * row.mark / most)
            line = f"M{_decimal(name + long * row.mark / most)} {_decimal(y + 1)}v18"
            parts.append(f'<path d="{line}" stroke="currentColor" stroke-width="2"/>')
        parts.append(text_line(x + 8, y + 14, row.note, bold=row.bold))
    return figure(name + long + note, 20.0 * len(rows) + 4, label, parts)


def key(entries: Sequence[tuple[str, str]]) -> str:
    """Return the key to the colours: a box of each, with its text."""
    outline = ' stroke="currentColor" stroke-width="0.8"'
    boxes = [
        f'<span style="white-space: nowrap; margin-right: 1.2em"><svg width="12" height="12" aria-hidden="true">'
        f"{_rect(0.5, 0.5, 11, 11, fill, outline)}</svg> {escape(content)}</span>"
        for fill, content in entries
    ]
    return f'<div style="font-size: 12px; margin: 0.3em 0; line-height: 1.7">{" ".join(boxes)}</div>'


# A Plan as HTML, for notebooks: where chunks lie, which rank multiplies them, the alternatives, the memory. Pure


_MULTIPLYING, _MOVING, _OTHER = "#56B4E9", "#E69F00", "#BBBBBB"
_TAKEN = "#56B4E9"
_MOST_WORKERS = 16
_MOST_WAYS = 8
_MOST_PRODUCTS = 24


def plan_html(plan: Plan) -> str:
    """Return a plan as notebooks show it."""
    unknown = "" if "a" in plan.where else "; those of A and B are not known yet"
    sections = [
        f"<div><b>@ is left to Dask's own tasks under enable():</b> {escape(plan.left)}</div>" if plan.left else "",
        f"<div>{escape(_sentence(plan))}</div>",
        _beside(f"Chunks, by the workers that hold them{unknown}", _chunk_grids(plan)),
        _beside(f"Who multiplies what: {WHAT[plan.method]}", _layout(plan)),
        _worker_key(plan),
    ]
    if plan.estimate:
        sections.append(_section("Estimated time, and what it was chosen against", _time_chart(plan)))
    if plan.projected_bytes:
        sections.append(_section("Projected memory of the workers", _memory_chart(plan)))
    return _plan_page(plan, sections)


def batch_html(plan: BatchPlan) -> str:
    """Return the plan for a batch as notebooks show it."""
    rows = []
    for name, estimate in (("items", plan.items), ("collective", plan.collective)):
        if estimate is not None:
            chosen = name == plan.route
            note = format_time(estimate.seconds) + ", chosen" * chosen
            rows.append(_time_bar(BATCH_ROUTES[name], note, estimate, bold=chosen))
    sections = [f"<div>{escape(plan.reason)}</div>"]
    if rows:
        chart = bar_chart(rows, "estimated time of both ways") + _time_key("multiplying", "moving", "having tasks")
        sections.append(_section("Estimated time", chart))
    if plan.route == "collective" and plan.plan is not None:
        sections.append(_section("Each run", plan.plan._repr_html_()))
    return _plan_page(plan, sections)


def group_html(plan: GroupPlan) -> str:
    """Return the plan for a group of products as notebooks show it: the longest first."""
    found = sorted(
        ((share.seconds * max(1, len(share.rows)), number, share) for number, share in enumerate(plan.shares) if share),
        key=lambda each: (-each[0], each[1]),
    )
    rows = []
    for seconds, number, share in found[:_MOST_PRODUCTS]:
        m, n, k = plan.shapes[number]
        fill = _MOVING if share.collective else _MULTIPLYING
        rows.append(
            Bar(f"{number}: {m} x {k} by {k} x {n}", in_words(share), (seconds,), (fill,), bold=share.collective)
        )
    sections = []
    if rows:
        legend = key([(_MULTIPLYING, "plain tasks, all together"), (_MOVING, "a collective run")])
        chart = bar_chart(rows, "estimated time of each") + _more(found, rows, "shorter ones") + legend
        sections.append(_section("Estimated time of each product", chart))
    return _plan_page(plan, sections)


def reason_html(reason: str) -> str:
    """Return the reason why Dask's own function would run, as notebooks show it."""
    why, _, advice = reason.partition("; ")
    todo = f"<div><b>What to change:</b> {escape(advice)}</div>" if advice else ""
    return _page([_title("Dask's own matmul would run"), f"<div><b>Why:</b> {escape(why)}</div>{todo}"])


def _page(sections: Iterable[str]) -> str:
    return f'<div style="font-family: sans-serif; font-size: 13px">{"".join(sections)}</div>'


def _plan_page(plan: object, sections: Iterable[str]) -> str:
    """Return the page of a plan: the first line of its text, sections, and its text."""
    text = repr(plan)
    return _page([_title(text.splitlines()[0]), *sections, _as_text(text)])


def _more(every: Sized, shown: Sized, what: str = "more") -> str:
    """Return how many are not shown; empty if all are."""
    return f"<div>and {len(every) - len(shown)} {what}</div>" if len(every) > len(shown) else ""


def _title(text: str) -> str:
    return f'<div style="font-size: 15px; font-weight: bold; margin-bottom: 0.4em">{escape(text)}</div>'


def _section(title: str, body: str) -> str:
    return f'<div style="margin: 1em 0 0.3em"><b>{escape(title)}</b></div><div>{body}</div>'


def _beside(title: str, body: str) -> str:
    """Return a section that others may stand beside."""
    style = "display: inline-block; vertical-align: top; width: 420px; max-width: 100%; margin-right: 24px"
    return f'<div style="{style}">{_section(title, body)}</div>'


def _as_text(text: str) -> str:
    return f'<details style="margin-top: 0.8em"><summary>As text</summary><pre>{escape(text)}</pre></details>'


def _sentence(plan: Plan) -> str:
    problem = plan.problem
    text = f"{problem.m} x {problem.k} {problem.a_dtype} times {problem.k} x {problem.n} {problem.b_dtype}: "
    text += f"{problem.flops:.3g} operations, {format_bytes(plan.bytes_moved)} moved between workers"
    return text + (f", {format_time(plan.estimate.seconds)} estimated." if plan.estimate else ".")


# Matrices


def _grid_edges(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))


def _operand(plan: Plan, operand: str, cells: Sequence[Cell], *edges: Sequence[int]) -> DrawnMatrix:
    """Return an operand, or D, with its parts and the edges of rows and columns of chunks."""
    rows, cols = plan.problem.chunks_of(operand)
    height, width = sum(rows), sum(cols)
    caption = f"{height} x {width}, {len(rows)} x {len(cols)} chunks"
    return DrawnMatrix(operand.upper(), caption, (height, width), cells, *edges)


def _chunk_grids(plan: Plan) -> str:
    """Draw the chunk grids in the colours of the ranks that hold the chunks."""
    rank_of = {participant: rank for rank, participant in enumerate(plan.ranks)}

    def holders(where: NDArray[np.int32] | None) -> NDArray[np.int64] | None:
        # Workers that only hand out chunks come after the ranks.
        others = [p for p in range(len(plan.participants)) if p not in rank_of]
        number = {**rank_of, **{p: len(plan.ranks) + at for at, p in enumerate(others)}}
        # Below zero: every rank has it.
        return None if where is None else np.array([number.get(int(p), -1) for p in where], np.int64)

    def who(owner: int) -> tuple[int, ...]:
        return (owner,) if owner >= 0 else tuple(range(len(plan.ranks)))

    steps = []
    drawn = []
    held = {name: holders(plan.where.get(name)) for name in "ab"}
    for operand, owners in (*held.items(), ("d", plan.owners)):
        sizes = plan.problem.chunks_of(operand)
        ncols = len(sizes[1])
        rows, row_step = coarse(_grid_edges(sizes[0]))
        cols, col_step = coarse(_grid_edges(sizes[1]))
        steps += [row_step, col_step]
        cells = [
            Cell(row, col, () if owners is None else who(int(owners[i * row_step * ncols + j * col_step])))
            for i, row in enumerate(itertools.pairwise(rows))
            for j, col in enumerate(itertools.pairwise(cols))
            if row[0] < row[1] and col[0] < col[1]
        ]
        drawn.append(_operand(plan, operand, cells))
    note = f"<div>Too many chunks to draw: one in {max(steps)} stands for its neighbours.</div>" * (max(steps) > 1)
    a, b, d = drawn
    return product_diagram(a, b, d, "chunks of A, B and D, and the workers that hold them") + note


def _layout(plan: Plan) -> str:
    """Draw how A, B and D lie on the ranks while they are multiplied, over their chunks."""
    tiles = ENGINES[plan.engine].tiles(plan)
    note = ""
    if tiles is not None:
        everyone = tuple(range(len(plan.ranks)))
        whole = [Cell((0, plan.problem.m), (0, plan.problem.n), everyone)]
        found = [
            _dealt(tiles.a, (plan.problem.m, plan.problem.k)),
            _dealt(tiles.b, (plan.problem.k, plan.problem.n)),
            whole if tiles.replicated else _dealt(tiles.d, (plan.problem.m, plan.problem.n)),
        ]
        blocks = " and ".join(f"{a} x {b}" for a, b in dict.fromkeys(tile.layout.blocks for tile in (tiles.a, tiles.b)))
        note = f"<div>Block-cyclic tiles, A and B in blocks of {blocks}; the library gathers what a rank lacks.</div>"
    else:
        found = [
            _operand_parts(plan, plan.rows, plan.depth, (0, 2)),
            _operand_parts(plan, plan.depth, plan.cols, (2, 1)),
            _result_parts(plan),
        ]
        if plan.grid[0] > 1 and plan.grid[1] > 1:
            note = "<div>Striped parts are needed by all ranks that they name.</div>"
        if plan.grid[2] > 1:
            note = "<div>Each rank gets sums for all of D from its parts of A and B; these are added up as drawn.</div>"
    drawn = []
    for operand, cells in zip("abd", found, strict=True):
        rows, cols = (coarse(_grid_edges(sizes))[0] for sizes in plan.problem.chunks_of(operand))
        drawn.append(_operand(plan, operand, _few(cells), rows, cols))
    a, b, d = drawn
    return product_diagram(a, b, d, "which ranks need which parts of A and B, and compute which part of D") + note


def _operand_parts(plan: Plan, rows: Sequence[int], cols: Sequence[int], axes: tuple[int, int]) -> list[Cell]:
    """Return the parts of an operand, with the ranks that need each; its axes are number `axes` of the ranks' grid."""
    who: dict[tuple[int, int], list[int]] = {}
    for rank in range(len(plan.ranks)):
        at = plan.coords(rank)
        who.setdefault((at[axes[0]], at[axes[1]]), []).append(rank)
    return [Cell((rows[i], rows[i + 1]), (cols[j], cols[j + 1]), tuple(ranks)) for (i, j), ranks in who.items()]


def _result_parts(plan: Plan) -> list[Cell]:
    """Return the parts of D that ranks have in the end, whatever chunks they belong to."""
    rects = [(rank, rect) for rank in range(len(plan.ranks)) for rect in plan.final_rects(rank)]
    return [Cell(rect[:2], rect[2:], (rank,)) for rank, rect in rects if rect[0] < rect[1] and rect[2] < rect[3]]


def _dealt(tile: Tile, shape: tuple[int, int]) -> list[Cell]:
    """Return the blocks of a block-cyclic layout, with the rank that has each."""
    layout = tile.layout
    rows, cols = (
        coarse([*range(0, length, block), length])[0] for length, block in zip(shape, layout.blocks, strict=True)
    )
    return [
        Cell(row, col, (layout.owner(row[0], col[0]),))
        for row in itertools.pairwise(rows)
        for col in itertools.pairwise(cols)
    ]


def _few(cells: Sequence[Cell], most: int = 1500) -> Sequence[Cell]:
    """Return this many cells at most: more can't be told apart."""
    return cells if len(cells) <= most else cells[:: -(-len(cells) // most)]


def _worker_key(plan: Placement) -> str:
    """Return which colour is which worker."""
    others = [w.address for i, w in enumerate(plan.participants) if i not in set(plan.ranks)]
    named = [(colour(rank), f"{rank}: {address}") for rank, address in enumerate(plan.workers)]
    for number, address in enumerate(others, start=len(named)):
        named.append((colour(number), f"{number}: {address} (hands out chunks)"))
    shown = named[:_MOST_WORKERS]
    return key(shown) + _more(named, shown)


# Bars


def _time_bar(name: str, note: str, estimate: Estimate | BatchEstimate, *, bold: bool = False) -> Bar:
    """Return the bar of a time: computing, moving, and the rest."""
    parts = [estimate.compute_seconds, estimate.transfer_seconds]
    parts.append(max(0.0, estimate.seconds - sum(parts)))
    return Bar(name, note, parts, (_MULTIPLYING, _MOVING, _OTHER), bold=bold)


def _time_key(computing: str, moving: str, other: str) -> str:
    return key([(_MULTIPLYING, computing), (_MOVING, moving), (_OTHER, other)])


def _time_chart(plan: Plan) -> str:
    chosen = plan.estimate
    assert chosen is not None
    ways: list[Estimate] = [chosen, *(e for e in plan.alternatives if e is not chosen)]
    rows = []
    for estimate in ways[:_MOST_WAYS]:
        note = f"{format_time(estimate.seconds)}, {format_bytes(estimate.bytes_moved)} moved"
        if estimate is chosen:
            note += ", chosen"
        elif estimate.seconds < chosen.seconds:
            note += f", too much memory: {format_bytes(estimate.peak_bytes)} a worker"
        name = f"{estimate.method} {' x '.join(map(str, estimate.grid))}"
        rows.append(_time_bar(name, note, estimate, bold=estimate is chosen))
    if (own := plan.by_tasks) is not None:
        note = f"{format_time(own.seconds)}; the run with Dask's overhead takes {format_time(plan.seconds)}"
        rows.append(_time_bar("Dask's own tasks", note, own, bold=not plan.worth_it))
    more = _more(ways, ways[:_MOST_WAYS], "more, see the text")
    return bar_chart(rows, "estimated time of each way") + more + _time_key("multiplying", "moving", "messages")


def _memory_chart(plan: Placement) -> str:
    limits = {worker.address: worker.memory_limit for worker in plan.participants}
    fraction = plan.problem.options.limit_fraction
    most = sorted(plan.projected_bytes.items(), key=lambda pair: -pair[1])
    rows = []
    for address, size in most[:_MOST_WORKERS]:
        allowed = limits.get(address, 0) * fraction
        bound = f"of {format_bytes(allowed)} allowed" if allowed else "no limit"
        rows.append(Bar(address, f"{format_bytes(size)} {bound}", [size], [_TAKEN], mark=allowed or None))
    more = _more(most, rows, "more, with less")
    line = f"<div>The line is what a run may hold, {fraction:.0%} of the worker's memory limit.</div>"
    return bar_chart(rows, "projected memory of each worker against its limit") + more + line * any(limits.values())


# Factorizations, programs, waves, and results of several runs


_LINE, _MOST_LINES, _MOST_SPANS, _MOST_WAVES = 560.0, 16, 2000, 400


def factor_html(plan: FactorPlacement) -> str:
    """Return the plan of a factorization as notebooks show it: block columns, time, memory."""
    columns, drawn = plan.columns, []
    for number, matrix in enumerate(columns.matrices):
        cells = []
        for block in range(columns.first(number), columns.first(number) + matrix.count):
            _, start, stop = columns.blocks[block]
            if start < stop:
                cells.append(Cell((0, matrix.shape[0]), (start, stop), (columns.owner(block),)))
        names = plan.problem.operands
        name = names[number].upper() if number < len(names) else "result"
        drawn.append(DrawnMatrix(name, f"{matrix.shape[0]} x {matrix.shape[1]}", matrix.shape, _few(cells)))
    where = _section("Block columns, by the ranks that have them", _side_by_side(drawn, "which rank has which columns"))
    return _placement_html(plan, [where, _worker_key(plan)])


def program_html(plan: ProgramPlacement) -> str:
    """Return the plan of a program as notebooks show it: chunks of rows, the steps by rank on a time line, memory."""
    drawn = []
    for name, (rows, cols) in plan.problem.chunks.items():
        # A chunk whose rows are not known is drawn like the others.
        edges = _grid_edges([max(size, 1) for size in rows])
        owned = zip(itertools.pairwise(edges), plan.owners, strict=True)
        cells = [Cell(pair, (0, sum(cols)), (rank,)) for pair, rank in owned]
        height = "?" if min(rows) < 0 else str(sum(rows))
        drawn.append(DrawnMatrix(name.upper(), f"{height} x {sum(cols)}", (edges[-1], sum(cols)), _few(cells)))
    loops = "; one turn of a loop stands for all" * any(isinstance(step, Loop) for step in plan.steps(0))
    sections = [
        _section("Chunks of rows, by the ranks that have them", _side_by_side(drawn, "which rank has which rows")),
        _worker_key(plan),
        _section(f"Steps of each rank, where the matrix is well-conditioned{loops}", _time_lines(plan.spans)),
    ]
    return _placement_html(plan, sections)


def waves_html(plan: WavePlan) -> str:
    """Return the plan of a product in waves as notebooks show it: which wave needs what, time, memory."""
    problem, scheme = plan.problem, plan.scheme
    shapes = {"a": (problem.m, problem.k), "b": (problem.k, problem.n), "d": (problem.m, problem.n)}
    parts: dict[str, dict[tuple[tuple[int, int], tuple[int, int]], list[int]]] = {name: {} for name in shapes}
    for number, wave in enumerate(scheme.waves[:_MOST_WAVES], 1):
        boxes = {"a": (wave.rows, wave.depth), "b": (wave.depth, wave.cols), "d": (wave.rows, wave.cols)}
        for name, box in boxes.items():
            parts[name].setdefault(box, []).append(number)
    cells = {name: _few([Cell(*box, tuple(x)) for box, x in found.items()]) for name, found in parts.items()}
    a, b, d = (
        DrawnMatrix(name.upper(), f"{rows} x {cols}", (rows, cols), cells[name])
        for name, (rows, cols) in shapes.items()
    )
    seconds = [Bar("loading", format_time(scheme.read_seconds), [scheme.read_seconds], [_MOVING])]
    seconds.append(Bar("multiplying", format_time(scheme.run_seconds), [scheme.run_seconds], [_MULTIPLYING]))
    memory = f"{format_bytes(scheme.peak_bytes)} of {format_bytes(scheme.budget_bytes)} without spilling"
    bar = Bar("a worker", memory, [scheme.peak_bytes], [_TAKEN], mark=scheme.budget_bytes)
    return _plan_page(
        plan,
        [
            _section(
                f"Waves, by number; scheme {scheme.name}", product_diagram(a, b, d, "which wave needs which parts")
            ),
            _section(f"Estimated time: {format_time(plan.seconds)}", bar_chart(seconds, "loading and multiplying")),
            _section("Projected memory", bar_chart([bar], "projected memory of a worker")),
        ],
    )


def chain_html(plan: ChainPlan) -> str:
    """Return the plan of a result of several runs as notebooks show it: their times, and each of them."""
    rows, runs = [], []
    for number, run in enumerate(plan.runs[:_MOST_PRODUCTS], 1):
        title = repr(run).splitlines()[0].removeprefix("Plan: ")
        seconds = run.estimate.seconds if run.estimate is not None else 0.0
        rows.append(Bar(str(number), f"{format_time(seconds)}  {title}", [seconds], [_MULTIPLYING]))
        runs.append(f"<details><summary>{number}: {escape(title)}</summary>{run._repr_html_()}</details>")
    chart = _section("Estimated time of each run", bar_chart(rows, "estimated time of each run")) if rows else ""
    return _plan_page(plan, [chart, *runs])


def _placement_html(plan: FactorPlacement | ProgramPlacement, sections: Sequence[str]) -> str:
    charts, estimate = [], plan.estimate
    if estimate is not None:
        chart = bar_chart([_time_bar(plan.method, format_time(estimate.seconds), estimate)], "estimated time")
        charts.append(_section("Estimated time", chart + _time_key("computing", "moving or waiting", "other")))
    if plan.projected_bytes:
        charts.append(_section("Projected memory of the workers", _memory_chart(plan)))
    return _plan_page(plan, [*sections, *charts])


def _side_by_side(drawn: Sequence[DrawnMatrix], label: str) -> str:
    """Return matrices beside each other, in one scale."""
    longest, x, parts = max(1, *(size for one in drawn for size in one.shape)), 2.0, []
    heights = [max(_SHORTEST, _LONGEST * one.shape[0] / longest) for one in drawn]
    for one, height in zip(drawn, heights, strict=True):
        width = max(_SHORTEST, _LONGEST * one.shape[1] / longest)
        parts += _drawn(one, x, _TITLE, width, height) if all(one.shape) else []
        x += max(width, 130.0) + _GAP
    return figure(x, _TITLE + max(heights, default=0.0) + 4, label, parts)


def _time_lines(spans: Sequence[Span]) -> str:
    """Return a line for each rank with what it does when, and the key to the colours."""
    joined: list[Span] = []
    last: dict[int, int] = {}
    for rank, name, start, stop in spans:
        at = last.get(rank)
        if at is not None and joined[at][1] == name:
            joined[at] = (rank, name, joined[at][2], stop)
        else:
            last[rank] = len(joined)
            joined.append((rank, name, start, stop))
    end = max((stop for *_, stop in joined), default=0.0) or 1.0
    seconds: dict[str, float] = {}
    for _, name, start, stop in joined:
        seconds[name] = seconds.get(name, 0.0) + stop - start
    # The longest have colours of their own; the others share the last one.
    names = sorted(seconds.keys() - {"wait"}, key=lambda name: (-seconds[name], name))
    own = len(_COLOURS) - 1
    fills = {name: _COLOURS[min(number, own)] for number, name in enumerate(names)} | {"wait": "#EEEEEE"}
    named = [(fills[name], name) for name in names[:own]] + [(_COLOURS[own], "others")] * (len(names) > own)
    ranks = min(_MOST_LINES, 1 + max((rank for rank, *_ in joined), default=0))
    parts = [text_line(0, 20.0 * rank + 14, f"rank {rank}") for rank in range(ranks)]
    for rank, name, start, stop in joined[:_MOST_SPANS]:
        if rank < ranks:
            title = f"<title>{escape(name)}: {format_time(stop - start)}</title>"
            box = _rect(60 + _LINE * start / end, 20.0 * rank + 3, _LINE * (stop - start) / end, 14, fills[name])
            parts.append(box.removesuffix("/>") + f">{title}</rect>")
    parts.append(text_line(60, 20.0 * ranks + 14, "0", size=11))
    parts.append(text_line(60 + _LINE, 20.0 * ranks + 14, format_time(end), size=11, anchor="end"))
    chart = figure(64 + _LINE, 20.0 * ranks + 20, "what each rank does when", parts)
    return chart + key([*named, (fills["wait"], "wait")])
