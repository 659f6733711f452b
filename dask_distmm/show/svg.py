"""Matrices and bars as inline SVG: no script, no style sheet, readable on light and on dark pages. Pure.

Text and lines have the page's own colour (``currentColor``). Workers have the colours of Okabe and Ito that black
letters can be read on, told apart with most kinds of colour blindness; whatever is coloured is labelled too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

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

    parts = [text_line(x, y - 5, matrix.name, bold=True), text_line(x + 16, y - 5, matrix.caption, size=11)]
    labels = []
    for cell in matrix.cells:
        left, right, top, bottom = across(cell.cols[0]), across(cell.cols[1]), down(cell.rows[0]), down(cell.rows[1])
        # A tile that several ranks share is striped in their colours.
        stripes = cell.ranks[:8] or (None,)
        wide = (right - left) / len(stripes)
        parts += [_rect(left + at * wide, top, wide, bottom - top, colour(rank)) for at, rank in enumerate(stripes)]
        size = min(12, int(bottom - top) - 2)
        if size >= 7 and len(cell.label) * 0.62 * size <= right - left:
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
    parts = [
        *_drawn(b, x, _TITLE, width, depth),
        *_drawn(a, 2, y, depth, height),
        *_drawn(d, x, y, width, height),
    ]
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
