"""A Plan as HTML, for notebooks: where chunks lie, which rank multiplies them, the alternatives, the memory. Pure.

Text and lines have the page's own colour (``currentColor``). Workers have the colours of Okabe and Ito that black
letters can be read on, told apart with most kinds of colour blindness; whatever is coloured is labelled too.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence, Sized
from html import escape
from typing import Any

from dask.utils import format_bytes, format_time

from dask_distmm.arrays.product import NotCollective
from dask_distmm.planning.cublasmp import Tile
from dask_distmm.planning.cuts import chunk_cuts
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.planning.many import BatchPlan, ChainPlan, GroupPlan
from dask_distmm.planning.model import ENGINES, Estimate
from dask_distmm.planning.placement import Placement
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.program import ProgramPlacement
from dask_distmm.planning.waves import WavePlan
from dask_distmm.programs.check import Span
from dask_distmm.programs.steps import Loop
from dask_distmm.show.text import BATCH_ROUTES, WHAT, in_words, plan_line, source_of
from dask_distmm.tracing.place import Row

# Matrices and bars as inline SVG: no script, no style sheet, readable on light and on dark pages. Pure


_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#BBBBBB")
_NOBODY = "#DDDDDD"
_LONGEST, _SHORTEST, _GAP, _TITLE = 210.0, 46.0, 26.0, 18.0
_MOST_PARTS = 24

# A part of a matrix: where its rows begin and end, and its columns; the ranks that have it, none for no rank in
# particular.
Cell = tuple[tuple[int, int], tuple[int, int], tuple[int, ...]]
# A matrix: its shape, and what draws it, of a given place and size.
Drawing = tuple[tuple[int, int], Callable[[float, float, float, float], list[str]]]
# A line of a bar chart: the text before and after it; the lengths and colours of its parts, one after the other; where
# a line is drawn across it, None for none; whether it is the one that counts.
Bar = tuple[str, str, Sequence[tuple[float, str]], float | None, bool]


def colour(number: int | None) -> str:
    """Return the colour of a rank; None is for no rank in particular."""
    return _NOBODY if number is None else _COLOURS[number % len(_COLOURS)]


def label(ranks: Sequence[int]) -> str:
    """Return the text inside of a part."""
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}\N{EN DASH}{ranks[-1]}"
    return ", ".join(map(str, ranks[:4])) + ("\N{HORIZONTAL ELLIPSIS}" if len(ranks) > 4 else "")


def coarse(edges: Sequence[int]) -> tuple[list[int], int]:
    """Return few enough edges to be drawn, of those that there are, and which of how many were taken."""
    step = -(-(len(edges) - 1) // _MOST_PARTS) if len(edges) > 1 else 1
    return [*edges[:-1:step], edges[-1]], step


def _tag(name: str, content: str = "", **attributes: Any) -> str:
    """Return an element of SVG; numbers have one digit, and attributes that are None are left out."""
    attrs = {key.replace("_", "-"): value for key, value in attributes.items() if value is not None}
    texts = (f' {key}="{_decimal(value) if isinstance(value, float) else value}"' for key, value in attrs.items())
    return f"<{name}{''.join(texts)}" + (f">{content}</{name}>" if content else "/>")


def _decimal(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, content: str, size: int = 12, *, bold: bool = False, **more: str) -> str:
    """Return a line of text."""
    attrs: dict[str, Any] = {"x": x + 0.0, "y": y + 0.0, "font_size": size, "fill": "currentColor"} | more
    return _tag("text", escape(content), **attrs, font_weight="bold" if bold else None)


def _rect(
    x: float, y: float, width: float, height: float, fill: str, outline: str | None = None, thick: float = 0.8
) -> str:
    where: dict[str, Any] = {"x": x + 0.0, "y": y + 0.0, "width": width + 0.0, "height": height + 0.0}
    return _tag("rect", **where, fill=fill, stroke=outline, stroke_width=thick if outline else None)


def _figure(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """Return a whole SVG; `label` describes it to those who can't see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_decimal(width)}" height="{_decimal(height)}" '
        f'viewBox="0 0 {_decimal(width)} {_decimal(height)}" role="img" aria-label="{escape(label, quote=True)}" '
        f'font-family="sans-serif" style="max-width: 100%">{"".join(parts)}</svg>'
    )


def matrix(
    name: str,
    shape: tuple[int, int],
    cells: Sequence[Cell],
    edges: tuple[Sequence[int], Sequence[int]] = ((), ()),
    caption: str = "",
) -> Drawing:
    """Return a matrix to be drawn, of coloured parts, with lines at the edges of its chunks."""
    caption = caption or f"{shape[0]} x {shape[1]}"
    # More parts can't be told apart.
    shown = cells if len(cells) <= _MOST_CELLS else cells[:: -(-len(cells) // _MOST_CELLS)]

    def drawn(x: float, y: float, width: float, height: float) -> list[str]:
        down, across = height / shape[0], width / shape[1]
        parts = [_text(x, y - 5, name, bold=True), _text(x + 9 + 7.2 * len(name), y - 5, caption, 11)]
        labels = []
        for rows, cols, ranks in shown:
            left, right = (x + across * column for column in cols)
            top, bottom = (y + down * row for row in rows)
            # A tile that several ranks share is striped in their colours.
            stripes = ranks[:8] or (None,)
            wide = (right - left) / len(stripes)
            parts += [_rect(left + at * wide, top, wide, bottom - top, colour(rank)) for at, rank in enumerate(stripes)]
            size, text = min(12, int(bottom - top) - 2), label(ranks)
            if size >= 7 and len(text) * 0.62 * size <= right - left - 3:
                labels.append(
                    _text(
                        (left + right) / 2, (top + bottom) / 2 + size / 3, text, size, text_anchor="middle", fill="#000"
                    )
                )
            parts.append(_rect(left, top, right - left, bottom - top, "none", "#000"))
        lines = [f"M{_decimal(x)} {_decimal(y + down * edge)}h{_decimal(width)}" for edge in edges[0][1:-1]]
        lines += [f"M{_decimal(x + across * edge)} {_decimal(y)}v{_decimal(height)}" for edge in edges[1][1:-1]]
        if lines:
            dashes: dict[str, Any] = {"stroke_opacity": "0.35", "stroke_width": 0.8, "stroke_dasharray": "3 2"}
            parts.append(_tag("path", d="".join(lines), stroke="#000", **dashes))
        return [*parts, *labels, _rect(x, y, width, height, "none", "currentColor", 1.2)]

    return shape, drawn


def product_diagram(a: Drawing, b: Drawing, d: Drawing, label: str) -> str:
    """Return A to the left of D and B above it, as they meet in the product."""
    ((m, k), draw_a), ((_, n), draw_b), (_, draw_d) = a, b, d
    height, width, depth = (max(_SHORTEST, _LONGEST * length / max(m, n, k)) for length in (m, n, k))
    # Captions are longer than narrow matrices are wide.
    x, y = max(depth, 150.0) + _GAP, _TITLE + depth + _GAP + _TITLE
    parts = [*draw_b(x, _TITLE, width, depth), *draw_a(2, y, depth, height), *draw_d(x, y, width, height)]
    return _figure(x + max(width, 170.0) + 4, y + height + 4, label, parts)


def _side_by_side(drawn: Sequence[Drawing], label: str) -> str:
    """Return matrices beside each other, in one scale."""
    longest, x, parts = max(1, *(size for shape, _ in drawn for size in shape)), 2.0, list[str]()
    heights = [max(_SHORTEST, _LONGEST * shape[0] / longest) for shape, _ in drawn]
    for (shape, draw), height in zip(drawn, heights, strict=True):
        width = max(_SHORTEST, _LONGEST * shape[1] / longest)
        parts += draw(x, _TITLE, width, height) if all(shape) else []
        x += max(width, 130.0) + _GAP
    return _figure(x, _TITLE + max(heights, default=0.0) + 4, label, parts)


def bar_chart(rows: Sequence[Bar], label: str) -> str:
    """Return a bar chart."""
    most = max(max(sum(length for length, _ in parts), mark or 0) for _, _, parts, mark, _ in rows) or 1
    first = 12 + 7.2 * max(len(row[0]) for row in rows)
    scale, drawn = 220.0 / most, []
    for at, (name, note, parts, mark, bold) in enumerate(rows):
        y, x = 20.0 * at, first
        drawn.append(_text(0, y + 14, name, bold=bold))
        for length, fill in parts:
            drawn.append(_rect(x, y + 3, scale * length, 14, fill))
            x += scale * length
        drawn.append(_rect(first, y + 3, x - first, 14, "none", "currentColor"))
        if mark is not None:
            line = f"M{_decimal(first + scale * mark)} {_decimal(y + 1)}v18"
            drawn.append(_tag("path", d=line, stroke="currentColor", stroke_width=2))
            x = max(x, first + scale * mark)
        drawn.append(_text(x + 8, y + 14, note, bold=bold))
    return _figure(first + 236 + 6.6 * max(len(row[1]) for row in rows), 20.0 * len(rows) + 4, label, drawn)


def key(entries: Sequence[tuple[str, str]]) -> str:
    """Return the key to the colours: a box of each, with its text."""
    boxes = [
        f'<span style="white-space: nowrap; margin-right: 1.2em"><svg width="12" height="12" aria-hidden="true">'
        f"{_rect(0.5, 0.5, 11, 11, fill, 'currentColor')}</svg> {escape(content)}</span>"
        for fill, content in entries
    ]
    return f'<div style="font-size: 12px; margin: 0.3em 0; line-height: 1.7">{" ".join(boxes)}</div>'


# Parts of pages


def page(title: str, sections: Iterable[str], text: str = "") -> str:
    """Return a page of sections, and all that there is as text."""
    folded = f'<details style="margin-top: 0.8em"><summary>As text</summary><pre>{escape(text)}</pre></details>'
    style = "font-size: 15px; font-weight: bold; margin-bottom: 0.4em"
    body = f'<div style="{style}">{escape(title)}</div>{"".join(sections)}{folded if text else ""}'
    return f'<div style="font-family: sans-serif; font-size: 13px">{body}</div>'


def _section(title: str, body: str) -> str:
    return f'<div style="margin: 1em 0 0.3em"><b>{escape(title)}</b></div><div>{body}</div>'


def _bars(title: str, rows: Sequence[Bar], label: str, *below: str) -> str:
    """Return the section of a bar chart, and what is below it; empty without bars."""
    return _section(title, bar_chart(rows, label) + "".join(below)) if rows else ""


def _beside(title: str, body: str) -> str:
    """Return a section that others may stand beside."""
    style = "display: inline-block; vertical-align: top; width: 420px; max-width: 100%; margin-right: 24px"
    return f'<div style="{style}">{_section(title, body)}</div>'


def _said(text: str, what: str = "") -> str:
    return f"<div>{what and f'<b>{what}</b> '}{escape(text)}</div>" if text else ""


def _more(every: Sized, shown: Sized, what: str = "more") -> str:
    """Return how many are not shown; empty if all are."""
    return _said(f"and {len(every) - len(shown)} {what}" * (len(every) > len(shown)))


_MULTIPLYING, _MOVING, _OTHER = _TAKEN, _, _ = "#56B4E9", "#E69F00", "#BBBBBB"
_MOST_WORKERS = 16
_MOST_WAYS = 8
_MOST_PRODUCTS = 24
_MOST_CELLS = 1500
# The picture of a traced function: its width, that of a frame's edge, the height of a box.
_PAGE, _INSET, _BOX, _MOST_STATEMENTS = 760.0, 14.0, 52.0, 400
_LINE, _MOST_LINES, _MOST_SPANS, _MOST_WAVES = 560.0, 16, 2000, 400


def _worker_key(plan: Placement) -> str:
    """Return which colour is which worker."""
    idle = [w.address for i, w in enumerate(plan.participants) if i not in set(plan.ranks)]
    addresses = [*plan.workers, *(f"{address} (hands out chunks)" for address in idle)]
    named = [(colour(number), f"{number}: {address}") for number, address in enumerate(addresses)]
    return key(named[:_MOST_WORKERS]) + _more(named, named[:_MOST_WORKERS])


def _time_bar(name: str, note: str, estimate: Estimate, *, bold: bool = False) -> Bar:
    """Return the bar of a time: computing, moving, and the rest."""
    lengths = (estimate.compute_seconds, _MULTIPLYING), (estimate.transfer_seconds, _MOVING)
    return name, note, (*lengths, (estimate.rest_seconds, _OTHER)), None, bold


def _time_key(computing: str, moving: str, rest: str) -> str:
    return key([(_MULTIPLYING, computing), (_MOVING, moving), (_OTHER, rest)])


def _memory_chart(plan: Placement) -> str:
    """Return the section of the memory of the workers; empty where that is not known."""
    limits = {worker.address: worker.memory_limit for worker in plan.participants}
    fraction = plan.problem.options.limit_fraction
    most = sorted(plan.projected_bytes.items(), key=lambda pair: -pair[1])
    rows: list[Bar] = []
    for address, size in most[:_MOST_WORKERS]:
        allowed = limits.get(address, 0) * fraction
        bound = f" of {format_bytes(allowed)} allowed" if allowed else ", no limit"
        rows.append((address, f"{format_bytes(size)}{bound}", [(size, _TAKEN)], allowed or None, False))
    line = f"The line is what a run may hold, {fraction:.0%} of the worker's memory limit." * any(limits.values())
    below = _more(most, rows, "more, with less"), _said(line)
    return _bars("Projected memory of the workers", rows, "projected memory of each worker against its limit", *below)


# Products


def plan_html(plan: Plan) -> list[str]:
    """Return what notebooks show of a plan."""
    problem, unknown = plan.problem, "" if "a" in plan.where else "; those of A and B are not known yet"
    sentence = f"{problem.m} x {problem.k} {problem.a.dtype} times {problem.k} x {problem.n} {problem.b.dtype}: "
    sentence += f"{problem.flops:.3g} operations, {format_bytes(plan.bytes_moved)} moved between workers"
    sentence += f", {format_time(plan.estimate.seconds)} estimated." if plan.estimate else "."
    return [
        _said(plan_line(plan) if plan.left is not None else ""),
        _said(sentence),
        _beside(f"Chunks, by the workers that hold them{unknown}", _chunk_grids(plan)),
        _beside(f"Who multiplies what: {WHAT[plan.method]}", _layout(plan)),
        _worker_key(plan),
        _time_chart(plan, "multiplying", "moving", "messages"),
        _memory_chart(plan),
    ]


def _cells(rows: Sequence[int], cols: Sequence[int], ranks: Callable[[int, int], tuple[int, ...]]) -> list[Cell]:
    """Return the parts between edges that are not empty, and the ranks of each by its numbers."""
    pairs = itertools.product(*(enumerate(itertools.pairwise(edges)) for edges in (rows, cols)))
    return [(row, col, ranks(i, j)) for (i, row), (j, col) in pairs if row[0] < row[1] and col[0] < col[1]]


def _operand(plan: Plan, operand: str, cells: Sequence[Cell], *, lines: bool = False) -> Drawing:
    """Return an operand, or D, with its parts."""
    rows, cols = plan.problem[operand].chunks
    edges = (coarse(chunk_cuts(rows))[0], coarse(chunk_cuts(cols))[0]) if lines else ((), ())
    shape = sum(rows), sum(cols)
    caption = f"{shape[0]} x {shape[1]}, {len(rows)} x {len(cols)} chunks"
    return matrix(operand.upper(), shape, cells, edges, caption)


def _chunk_grids(plan: Plan) -> str:
    """Draw the chunk grids in the colours of the ranks that hold the chunks."""
    rank_of = {participant: rank for rank, participant in enumerate(plan.ranks)}
    # Workers that only hand out chunks come after the ranks.
    idle = [p for p in range(len(plan.participants)) if p not in rank_of]
    number = rank_of | {p: len(plan.ranks) + at for at, p in enumerate(idle)}

    steps = [1]

    def drawn(operand: str) -> Drawing:
        sizes, owners = plan.problem[operand].chunks, plan.owners if operand == "d" else plan.where.get(operand)
        (rows, row_step), (cols, col_step) = (coarse(chunk_cuts(axis)) for axis in sizes)
        steps.extend((row_step, col_step))

        def who(i: int, j: int) -> tuple[int, ...]:
            if owners is None:
                return ()
            # Others than these: every rank has it.
            owner = int(owners[i * row_step * len(sizes[1]) + j * col_step])
            owner = owner if operand == "d" else number.get(owner, -1)
            return (owner,) if owner >= 0 else tuple(range(len(plan.ranks)))

        return _operand(plan, operand, _cells(rows, cols, who))

    a, b, d = map(drawn, "abd")
    note = f"Too many chunks to draw: one in {max(steps)} stands for its neighbours." * (max(steps) > 1)
    return product_diagram(a, b, d, "chunks of A, B and D, and the workers that hold them") + _said(note)


def _layout(plan: Plan) -> str:
    """Draw how A, B and D lie on the ranks while they are multiplied, over their chunks."""
    tiles, problem, note = ENGINES[plan.engine].tiles(plan), plan.problem, ""
    if tiles is not None:
        every = zip("abd", (tiles.a, tiles.b, tiles.d), strict=True)
        layouts = [_dealt(tile, problem[name].shape) for name, tile in every]
        if tiles.replicated:
            layouts[2] = [((0, problem.m), (0, problem.n), tuple(range(len(plan.ranks))))]
        blocks = " and ".join(f"{a} x {b}" for a, b in dict.fromkeys(tile.layout.blocks for tile in (tiles.a, tiles.b)))
        note = f"Block-cyclic tiles, A and B in blocks of {blocks}; the library gathers what a rank lacks."
    else:
        ends = [(rank, rect) for rank in range(len(plan.ranks)) for rect in plan.final_rects(rank)]
        layouts = [
            _operand_parts(plan, plan.rows, plan.depth, (0, 2)),
            _operand_parts(plan, plan.depth, plan.cols, (2, 1)),
            # The parts of D that ranks have in the end, whatever chunks they belong to.
            [(rect[:2], rect[2:], (rank,)) for rank, rect in ends if rect[0] < rect[1] and rect[2] < rect[3]],
        ]
        if plan.grid[0] > 1 and plan.grid[1] > 1:
            note = "Striped parts are needed by all ranks that they name."
        if plan.grid[2] > 1:
            note = "Each rank gets sums for all of D from its parts of A and B; these are added up as drawn."
    a, b, d = (_operand(plan, name, cells, lines=True) for name, cells in zip("abd", layouts, strict=True))
    label = "which ranks need which parts of A and B, and compute which part of D"
    return product_diagram(a, b, d, label) + _said(note)


def _operand_parts(plan: Plan, rows: Sequence[int], cols: Sequence[int], axes: tuple[int, int]) -> list[Cell]:
    """Return the parts of an operand, with the ranks that need each; its axes are number `axes` of the ranks' grid."""
    who: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rank in range(len(plan.ranks)):
        at = tuple(plan.coords(rank)[axis] for axis in axes)
        who[at] = (*who.get(at, ()), rank)
    return _cells(rows, cols, lambda *at: who[at])


def _dealt(tile: Tile, shape: tuple[int, int]) -> list[Cell]:
    """Return the blocks of a block-cyclic layout, with the rank that has each."""
    blocks = zip(shape, tile.layout.blocks, strict=True)
    rows, cols = (coarse([*range(0, length, block), length])[0] for length, block in blocks)
    return _cells(rows, cols, lambda i, j: (tile.layout.owner(rows[i], cols[j]),))


def _time_chart(plan: Placement, computing: str, moving: str, rest: str) -> str:
    """Return the section of the times of the ways that a plan was chosen from, and of Dask's own tasks."""
    chosen = plan.estimate
    if chosen is None:
        return ""
    ways = [chosen, *(e for e in plan.alternatives if e is not chosen)]
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
    below = _more(ways, ways[:_MOST_WAYS], "more, see the text"), _time_key(computing, moving, rest)
    return _bars("Estimated time, and what it was chosen against", rows, "estimated time of each way", *below)


def batch_html(plan: BatchPlan) -> list[str]:
    """Return what notebooks show of the plan for a batch."""
    counts = {name: x for name, x in (("items", plan.items), ("collective", plan.collective)) if x is not None}
    rows = [
        _time_bar(
            BATCH_ROUTES[name], format_time(x.seconds) + ", chosen" * (name == plan.route), x, bold=name == plan.route
        )
        for name, x in counts.items()
    ]
    below = _time_key("multiplying", "moving", "having tasks")
    each = plan.plan._repr_html_() if plan.route == "collective" and plan.plan is not None else ""
    return [
        _said(plan.reason),
        _bars("Estimated time", rows, "estimated time of both ways", below),
        each and _section("Each run", each),
    ]


def group_html(plan: GroupPlan) -> list[str]:
    """Return what notebooks show of the plan for a group of products: the longest first."""
    slowest = sorted(
        ((share.seconds * max(1, len(share.rows)), number, share) for number, share in enumerate(plan.shares) if share),
        key=lambda each: (-each[0], each[1]),
    )
    rows: list[Bar] = []
    for seconds, number, share in slowest[:_MOST_PRODUCTS]:
        m, n, k = plan.shapes[number]
        fill = _MOVING if share.collective else _MULTIPLYING
        rows.append((f"{number}: {m} x {k} by {k} x {n}", in_words(share), [(seconds, fill)], None, share.collective))
    legend = key([(_MULTIPLYING, "plain tasks, all together"), (_MOVING, "a collective run")])
    more = _more(slowest, rows, "shorter ones")
    return [_bars("Estimated time of each product", rows, "estimated time of each", more, legend)]


def waves_html(plan: WavePlan) -> list[str]:
    """Return what notebooks show of a product in waves: which wave needs what, time, memory."""
    problem, scheme = plan.problem, plan.scheme
    parts: dict[str, dict[tuple[tuple[int, int], tuple[int, int]], list[int]]] = {name: {} for name in "abd"}
    for number, (rows, cols, depth) in enumerate(scheme.waves[:_MOST_WAVES], 1):
        boxes = {"a": (rows, depth), "b": (depth, cols), "d": (rows, cols)}
        for name, box in boxes.items():
            parts[name].setdefault(box, []).append(number)
    a, b, d = (
        matrix(name.upper(), problem[name].shape, [(*box, tuple(waves)) for box, waves in parts[name].items()])
        for name in "abd"
    )
    both = ("loading", scheme.read_seconds, _MOVING), ("multiplying", scheme.run_seconds, _MULTIPLYING)
    times: list[Bar] = [(name, format_time(seconds), [(seconds, fill)], None, False) for name, seconds, fill in both]
    memory = f"{format_bytes(scheme.peak_bytes)} of {format_bytes(scheme.budget_bytes)} without spilling"
    bar: Bar = ("a worker", memory, [(scheme.peak_bytes, _TAKEN)], scheme.budget_bytes, False)
    return [
        _section(f"Waves, by number; scheme {scheme.name}", product_diagram(a, b, d, "which wave needs which parts")),
        _bars(f"Estimated time: {format_time(plan.seconds)}", times, "loading and multiplying"),
        _bars("Projected memory", [bar], "projected memory of a worker"),
    ]


# Factorizations, programs, and results of several runs


def factor_html(plan: FactorPlacement) -> list[str]:
    """Return what notebooks show of the plan of a factorization: block columns, time, memory."""
    columns, names, drawn = plan.columns, plan.problem.operands, []
    for number, factor in enumerate(columns.matrices):
        blocks = range(columns.first(number), columns.first(number) + factor.count)
        parts = [(columns.blocks[block][1:], columns.owner(block)) for block in blocks]
        cells = [((0, factor.shape[0]), (start, stop), (rank,)) for (start, stop), rank in parts if start < stop]
        drawn.append(matrix(names[number].upper() if number < len(names) else "result", factor.shape, cells))
    where = _section("Block columns, by the ranks that have them", _side_by_side(drawn, "which rank has which columns"))
    times = _time_chart(plan, "computing", "moving or waiting", "other")
    return [where, _worker_key(plan), times, _memory_chart(plan)]


def program_html(plan: ProgramPlacement) -> list[str]:
    """Return what notebooks show of the plan of a program: chunks of rows, steps by rank on a time line, memory."""
    drawn = []
    for operand in plan.problem.matrices:
        # A chunk whose rows are not known is drawn like the others.
        rows, width = operand.chunks[0], operand.shape[1]
        edges, caption = chunk_cuts(tuple(max(size, 1) for size in rows)), f"? x {width}" * (min(rows) < 0)
        cells = _cells(edges, (0, width), lambda i, _: (plan.owners[i],))
        drawn.append(matrix(operand.name.upper(), (edges[-1], width), cells, caption=caption))
    statements = plan.problem.statements
    loops = "; one turn of a loop stands for all" * any(isinstance(step, Loop) for step in plan.steps(0))
    return [
        _section("Chunks of rows, by the ranks that have them", _side_by_side(drawn, "which rank has which rows")),
        _worker_key(plan),
        _section("Statements", _statements(statements) + _more(statements, statements[:_MOST_STATEMENTS]))
        if statements
        else "",
        _section(f"Steps of each rank, where the matrix is well-conditioned{loops}", _time_lines(plan.spans)),
        _time_chart(plan, "computing", "moving or waiting", "other"),
        _memory_chart(plan),
    ]


def _statements(rows: Sequence[Row]) -> str:
    """Return the statements of a traced function: boxes below the lines of its source, frames around loops."""
    parts, y, x, line = list[str](), 0.0, 0.0, ""
    # The frames that are open, by their depths: where they begin.
    frames: list[tuple[int, float]] = []

    def close(depth: int) -> None:
        nonlocal y
        while frames and frames[-1][0] >= depth:
            at, top = frames.pop()
            inset = 1 + _INSET * at
            parts.insert(0, _rect(inset, top, _PAGE - 2 * inset, y + 8 - top, "none", "currentColor"))
            y += 14

    for row in rows[:_MOST_STATEMENTS]:
        close(row.depth)
        left, right = _INSET * row.depth + 6, _PAGE - _INSET * row.depth - 6
        source, place = source_of(row)
        if not row.kind:
            frames.append((row.depth, y + 4))
            parts.append(_text(left, y + 20, row.what, bold=True))
            y, line = y + 26, ""
            continue
        if row.line != line:
            code, line = source[: int((right - left) / 7.3) - 18], row.line
            parts.append(_text(left, y + 16, code, font_family="monospace", style="white-space: pre"))
            parts.append(_text(right, y + 16, place, 10, text_anchor="end"))
            y, x = y + 22, left
            y += _BOX
        moved = f"\N{RIGHTWARDS ARROW OVER LEFTWARDS ARROW} {format_bytes(row.moved)}" * bool(row.moved)
        width = 14 + max(7.4 * len(row.what), 6.2 * len(row.kind), 6.4 * len(moved))
        if x > left and x + width > right:
            y, x = y + _BOX, left
        top, fill = y - _BOX, _MULTIPLYING if row.where.startswith("rows") else _NOBODY
        note = _tag("title", escape(f"{row.where}: {source}"))
        inside = [(row.what, 12), (row.kind, 10), *([(moved, 11)] if moved else [])]
        texts = (_text(x + 6, top + 14 + 13 * at, text, size, fill="#000") for at, (text, size) in enumerate(inside))
        # Values that travel have a thick edge.
        edge = (_MOVING, 3.0) if moved else ("#000", 0.8)
        parts.append(_tag("g", note + _rect(x, top, width, _BOX - 6, fill, *edge) + "".join(texts)))
        x += width + 8
    close(0)
    legend = key(
        [(_MULTIPLYING, "in rows, on their ranks"), (_NOBODY, "on all ranks"), (_MOVING, "comes from all ranks")]
    )
    return _figure(_PAGE, y + 4, "the statements, where values are, and what travels", parts) + legend


def chain_html(plan: ChainPlan) -> list[str]:
    """Return what notebooks show of a result of several runs: their times, and each of them."""
    rows: list[Bar] = []
    runs = []
    for number, run in enumerate(plan.runs[:_MOST_PRODUCTS], 1):
        title, seconds = repr(run).splitlines()[0].removeprefix("Plan: "), run.estimate.seconds if run.estimate else 0.0
        rows.append((str(number), f"{format_time(seconds)}  {title}", [(seconds, _MULTIPLYING)], None, False))
        runs.append(f"<details><summary>{number}: {escape(title)}</summary>{run._repr_html_()}</details>")
    return [_bars("Estimated time of each run", rows, "estimated time of each run"), *runs]


def _time_lines(spans: Sequence[Span]) -> str:
    """Return a line for each rank with what it does when, and the key to the colours."""
    by_rank = itertools.groupby(sorted(spans, key=operator.itemgetter(0)), operator.itemgetter(0, 1))
    repeated = (list(lines) for _, lines in by_rank)
    joined = sorted(((*lines[0][:3], lines[-1][3]) for lines in repeated), key=operator.itemgetter(2))
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
    parts = [_text(0, 20.0 * rank + 14, f"rank {rank}") for rank in range(ranks)]
    for rank, name, start, stop in joined[:_MOST_SPANS]:
        if rank < ranks:
            title = f"<title>{escape(name)}: {format_time(stop - start)}</title>"
            box = _rect(60 + _LINE * start / end, 20.0 * rank + 3, _LINE * (stop - start) / end, 14, fills[name])
            parts.append(box.removesuffix("/>") + f">{title}</rect>")
    parts.append(_text(60, 20.0 * ranks + 14, "0", 11))
    parts.append(_text(60 + _LINE, 20.0 * ranks + 14, format_time(end), 11, text_anchor="end"))
    chart = _figure(64 + _LINE, 20.0 * ranks + 20, "what each rank does when", parts)
    return chart + key([*named, (fills["wait"], "wait")])


def reason_html(choice: NotCollective) -> str:
    """Return the reason why Dask's own function would run, as notebooks show it."""
    why, _, advice = choice.reason.partition("; ")
    return page("Dask's own matmul would run", [_said(why, "Why:"), _said(advice, "What to change:")])
