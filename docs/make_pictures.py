"""Draw the pictures of the algorithm from the package's own objects: plans, programs, panels, layouts, graphs.

``python -m docs.make_pictures`` writes ``docs/pictures/*.svg``; ``--png FOLDER`` writes PNGs there instead, to
look at. The same sources give the same bytes. All coordinates are pixels of a page 800 wide, y going down.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import warnings
from pathlib import Path
from typing import Any

import dask.array as da
import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from dask_distmm.arrays.request import parse
from dask_distmm.config import read_options
from dask_distmm.graph import build_graph
from dask_distmm.layout import Layout, ProcessGrid, redistribution
from dask_distmm.planning import NamedMatrix, Plan, Worker, plan
from dask_distmm.planning.cuts import pieces_of, traffic
from dask_distmm.planning.factor import FactorPlacement, FactorProblem
from dask_distmm.planning.groups import panels
from dask_distmm.programs.check import walk as in_any_order
from dask_distmm.programs.factorizations import Factorization
from dask_distmm.programs.steps import Call, Publish, Pull, flops_of
from tests.conformance import make_problem

# Okabe and Ito's colours; rank r has the same one in every picture.
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
INK, GREY, PALE, WHITE = "#222222", "#777777", "#EEEEEE", "#FFFFFF"
FOUR = tuple(Worker(f"worker-{index}") for index in range(4))
Color = str | tuple[float, ...]
Point = tuple[float, float]


def tint(rank: int, share: float = 0.4) -> Color:
    """Return a rank's colour mixed with white."""
    return tuple(round(1 - share * (1 - float(x)), 3) for x in to_rgb(RANKS[rank]))


def on(rank: int) -> str:
    """Return the colour of text on a rank's colour."""
    return WHITE if rank in (0, 2) else INK


def even(parts: int, size: int = 300) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a grid of equal chunks."""
    return ((size,) * parts,) * 2


class Page:
    """A drawing area 800 pixels wide."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(8, height / 100), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, 800), ylim=(height, 0))
        self.axes.axis("off")

    def box(self, x: float, y: float, w: float, h: float, fill: Color = "none", width: float = 0.8) -> None:
        """Draw a rectangle."""
        self.axes.add_patch(Rectangle((x, y), w, h, fc=fill, ec=INK, lw=width, clip_on=False))

    def text(self, x: float, y: float, text: str, size: float = 9, align: str = "left", **style: Any) -> None:
        """Write text, centred vertically on y."""
        usual: dict[str, Any] = {"size": size, "ha": align, "va": "center", "color": INK, "linespacing": 1.35}
        self.axes.text(x, y, text, **(usual | style))

    def title(self, x: float, y: float, text: str, align: str = "left") -> None:
        """Write text in bold."""
        self.text(x, y, text, 9.5, align, weight="bold")

    def line(self, *points: Point, color: str = INK, width: float = 1.0, style: str = "-", marker: str = "") -> None:
        """Draw a line through points."""
        self.axes.plot(*zip(*points, strict=True), style, c=color, lw=width, marker=marker, ms=5, clip_on=False)

    def arrow(self, start: Point, end: Point, color: str = INK) -> None:
        """Draw an arrow."""
        style = {"arrowstyle": "-|>", "color": color, "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", end, start, arrowprops=style)

    def disc(self, x: float, y: float, rank: int) -> None:
        """Write a rank's number on its colour."""
        self.axes.plot(x, y, "o", ms=14, mfc=RANKS[rank], mec=INK, mew=0.8, clip_on=False)
        self.text(x, y, str(rank), 8.5, "center", color=on(rank), weight="bold")


def why() -> Page:
    """Draw stock Dask's products and one collective, and count the tasks of both."""
    page = Page(530)
    page.title(20, 20, "Stock Dask: n x n x n products, and their sums")
    for left, name in ((20, "A"), (150, "B"), (280, "D")):
        page.title(left + 50, 46, name, "center")
        for i, j in itertools.product(range(4), repeat=2):
            hot = {"A": (i, j) == (1, 2), "B": i == 2, "D": i == 1}[name]
            page.box(left + 25 * j, 58 + 25 * i, 25, 25, tint(0, 1 if name == "A" else 0.4) if hot else PALE)
    page.text(135, 108, "@", 12, "center")
    page.text(265, 108, "=", 12, "center")
    page.text(20, 182, "The blue chunk of A meets 4 chunks of B in 4 tasks, wherever")
    page.text(20, 200, "these run. Further tasks sum 4 products to a chunk of D.")
    page.title(430, 20, "dask_distmm: one collective")
    for index, (x, ways) in enumerate([(470, 8)] * 8 + [(742, 4)] * 4):
        y = 48 + 18 * index if ways == 8 else 66 + 27 * (index - 8)
        page.box(x, y, 14, 14, tint(index // 2 if ways == 8 else index % 4, 0.6))
        page.arrow(*(((488, y + 7), (580, 119)) if ways == 8 else ((642, 119), (738, y + 7))), GREY)
    page.box(582, 100, 58, 38, PALE)
    page.text(611, 119, "barrier", 9, "center")
    labels = {(477, 208): "chunks of\nA and B", (611, 160): "one run on\nall workers", (749, 208): "chunks\nof D"}
    for (x, y), label in labels.items():
        page.text(x, y, label, 9, "center")
    page.title(20, 250, "Tasks of A @ B for n x n chunks, without those of A and B, before Dask's optimizer")
    for row, n in enumerate((4, 8, 16)):
        page.title(20, 301 + 84 * row, f"n = {n}")
        for bar, (count, name) in enumerate(zip(task_counts(n), ("stock Dask", "dask_distmm"), strict=True)):
            y = 274 + 84 * row + 30 * bar
            page.text(165, y + 13, name, 9, "right")
            page.box(175, y, count / 18, 24, (GREY, RANKS[0])[bar])
            page.text(183 + count / 18, y + 13, f"{count:,}", 9.5)
    return page


def task_counts(n: int) -> tuple[int, int]:
    """Return how many tasks stock Dask and we add for n x n chunks."""
    a, b = da.zeros((8 * n, 8 * n), chunks=8), da.ones((8 * n, 8 * n), chunks=8)
    with warnings.catch_warnings(action="ignore"):  # Dask's PerformanceWarning: n times as many chunks
        stock = len((a @ b).__dask_graph__()) - 2 * n * n
    problem = parse(a, b).problem
    return stock, len(build_graph(problem, a, b).layers[problem.name])


def solid(page: Page, made: Plan, left: float, top: float, size: float, shade: float = 1, numbers: bool = True) -> None:
    """Draw the m x n x k box of a plan, each rank's block in its colour: D in front, B on top, A to the right."""
    rows, cols, depth = (np.array(cuts) / cuts[-1] * size for cuts in (made.rows, made.cols, made.depth))
    for rank in range(len(made.ranks)):
        i, j, d = made.coords(rank)
        (r0, r1), (c0, c1), (k0, k1) = rows[i : i + 2], cols[j : j + 2], depth[d : d + 2]
        faces = (
            (d == 0, 1.0, ((r0, c0, 0), (r0, c1, 0), (r1, c1, 0), (r1, c0, 0))),
            (i == 0, 0.5, ((0, c0, k0), (0, c1, k0), (0, c1, k1), (0, c0, k1))),
            (j == made.grid[1] - 1, 0.75, ((r0, size, k0), (r1, size, k0), (r1, size, k1), (r0, size, k1))),
        )
        for share, corners in ((share, corners) for visible, share, corners in faces if visible):
            points = [(left + col + 0.5 * k, top - 0.38 * k + row) for row, col, k in corners]
            page.axes.add_patch(Polygon(points, fc=tint(rank, share * shade), ec=INK, lw=0.8, clip_on=False))
        if numbers and d == 0:
            page.text(left + (c0 + c1) / 2, top + (r0 + r1) / 2, str(rank), 10, "center", color=on(rank), weight="bold")
        elif numbers:
            k = (k0 + k1) / 2
            page.text(left + size / 2 + k / 2, top - 0.38 * k, str(rank), 9, "center", weight="bold")


def forced(method: str, parts: int = 4) -> Plan:
    """Return the plan of one method for a square problem; D has parts x parts chunks."""
    chunks = even(parts, 1200 // parts)
    return plan(make_problem(chunks, chunks, method=method), FOUR[: 1 if method == "local" else 4])


def box() -> Page:
    """Draw the box of all products, and one line of it."""
    page = Page(330)
    solid(page, forced("local"), 110, 135, 160, numbers=False)
    page.text(190, 215, "D, m x n", 9.5, "center", color=WHITE, weight="bold")
    page.text(310, 184, "A, m x k", 9.5, "center", weight="bold", rotation=-90)
    page.title(230, 105, "B, k x n", "center")
    page.text(260, 309, "n: columns of B and D", 9, "right")
    page.text(98, 215, "m: rows of\nA and D", 9, "right")
    page.text(128, 92, "k: what is\nsummed over", 9, "right")
    left, top, row, col, size = 450, 135, 100, 60, 160
    solid(page, forced("local"), left, top, size, 0.3, numbers=False)
    for r, c, color in ((row, col, INK), (row, size, RANKS[0]), (0, col, RANKS[0])):
        line = [(left + c + 0.5 * k, top + r - 0.38 * k) for k in np.linspace(0, size, 7).tolist()]
        page.line(*line, color=color, width=1.6, marker="o")
    page.line((left + col, top), (left + col, top + row), (left + size, top + row), color=GREY, style=":")
    for x, y, label in ((left + 20, top + row + 18, "D[i, j]"), (425, 92, "B[:, j]"), (700, 205, "A[i, :]")):
        page.title(x, y, label)
    page.text(130, 24, "Each point of the box is one product A[i, k] * B[k, j]; D[i, j] is the sum along a line.", 9.5)
    return page


def methods() -> Page:
    """Draw each method as a cut of the box, and what rank 1 reads and writes."""
    page = Page(800)
    for x, label in ((76, "the box"), (236, "needs of A"), (336, "needs of B"), (436, "part of D")):
        page.title(x, 18, label, "center")
    page.title(500, 18, "Shown: rank 1")
    notes = {
        "local": "One worker, rank 0, takes it all.\nGood for small products.",
        "allgather": "A slab of A, all of B. Good when\nB is the smaller operand.\n(1 x 4 x 1 is the other way round.)",
        "summa": "Rows of A, columns of B.\nGood when A and B are both large.",
        "reducescatter": "A slab of k: a sum over it for all of D\n(light). All ranks' sums for one slab of D\n"
        "are added up (solid). Good when k is long.",
        "allreduce": "The same, but what is added up are the\nchunks of D that the rank keeps. Good\n"
        "when these do not follow the slabs.",
    }
    for row, (method, note) in enumerate(notes.items()):
        made, top = forced(method, 2 if method == "allreduce" else 4), 40 + 152 * row
        me = min(1, len(made.ranks) - 1)
        solid(page, made, 20, top + 50, 84)
        (r0, r1, c0, c1), (k0, k1) = made.region(me), made.k_range(me)
        parts = [(r0, r1, k0, k1)], [(k0, k1, c0, c1)], [(r0, r1, c0, c1), *made.final_rects(me)]
        for x, rects in zip((194, 294, 394), parts, strict=True):
            page.box(x, top + 40, 84, 84, PALE)
            for number, (a, b, c, d) in enumerate(rects):
                share = 0.4 if number < len(rects) - 1 else 1
                page.box(x + c * 0.07, top + 40 + a * 0.07, (d - c) * 0.07, (b - a) * 0.07, tint(me, share))
        page.title(500, top + 36, f"{method}   {' x '.join(map(str, made.grid))}")
        page.text(500, top + 86, note)
        page.line((15, top - 3), (785, top - 3), color=GREY, width=0.5)
    return page


def cuts() -> Page:
    """Draw cuts along chunk edges and through chunks, and the owners of the chunks of D."""
    page, top, scale = Page(390), 62, 225 / 1200
    cases = (
        ((300, 300, 300, 300), "An edge in the middle:\nthe cut is there."),
        ((290, 320, 290, 300), "The edge at 610 is within 5%\nof balance: the cut is there."),
        ((400, 400, 400), "No edge near the middle:\nthe cut is even, at 600."),
    )
    for number, (sizes, title) in enumerate(cases):
        made, left = plan(make_problem((sizes, sizes), (sizes, sizes), method="summa"), FOUR), 25 + 262 * number
        page.title(left, 30, title)
        for rank in range(4):
            for index, (r0, r1, c0, c1) in pieces_of(made.chunk_cuts, made.region(rank)):
                x, y, w, h = left + c0 * scale, top + r0 * scale, (c1 - c0) * scale, (r1 - r0) * scale
                page.box(x, y, w, h, tint(rank))
                if made.owners[index] != rank:
                    page.line((x + 4, y + h - 4), (x + w - 4, y + 4), color=INK, width=0.8, style="--")
            r0, r1, c0, c1 = made.region(rank)
            page.box(left + c0 * scale, top + r0 * scale, (c1 - c0) * scale, (r1 - r0) * scale, width=3.0)
        for index, owner in enumerate(made.owners.tolist()):
            r0, r1, c0, c1 = made.chunk_rect(index)
            page.disc(left + (c0 + c1) / 2 * scale, top + (r0 + r1) / 2 * scale, owner)
        page.text(left, 302, f"rows cut at {', '.join(map(str, made.rows))}")
    page.text(25, 337, "Thin lines: chunks of D. Thick: cuts. Colour: the rank that computes. Disc: the owner.")
    page.text(25, 362, "Crossed with a dashed line: computed by a rank that is not the owner, sent there at the end.")
    return page


def walk() -> Page:
    """Draw the order of panels on each rank, and the overlap of fetching and multiplying on one."""
    holder = np.repeat(np.arange(4, dtype=np.int32), 16)
    problem = make_problem(even(8, 384), even(8, 384), method="allgather")
    problem = dataclasses.replace(problem, options=dataclasses.replace(problem.options, panel_bytes=1))
    made, page = plan(problem, FOUR, {"a": holder, "b": holder}), Page(480)
    page.title(20, 20, "Order of the panels of k. Colour: the worker that holds the panel's rows of B.")
    walks = [panels(made, rank) for rank in range(4)]
    for rank, order in enumerate(walks):
        y = 42 + 34 * rank
        page.disc(36, y + 13, rank)
        page.text(56, y + 13, f"rank {rank}")
        for step, panel in enumerate(order):
            source, home = next(iter(panel.remote), made.ranks[rank]), "" if panel.remote else ", home"
            page.box(120 + 76 * step, y, 72, 26, RANKS[source], 2.4 if home else 0.6)
            page.text(156 + 76 * step, y + 13, f"{panel.k0 // 384}{home}", 9, "center", color=on(source))
    page.text(120, 190, "First what is at home, then on from there: here no worker is asked by two ranks in one step.")
    page.title(20, 226, "Rank 0 in time, if a panel takes 0.8 of a multiply to arrive")
    start, link = 0.0, 0.0
    asked: list[Point] = []
    for step, panel in enumerate(walks[0]):
        for coming in walks[0][len(asked) : step + problem.options.prefetch_panels + 1]:
            link = max(link, start) + (0.8 if coming.remote else 0.0)
            asked.append((start, link))
        (since, until), number, source = asked[step], panel.k0 // 384, next(iter(panel.remote), 0)
        start = max(start, until)
        page.box(130 + 72 * start, 412, 70, 28, RANKS[source])
        page.text(166 + 72 * start, 426, str(number), 9.5, "center", color=on(source))
        if panel.remote:
            page.box(130 + 72 * since, 198 + 26 * step, 72 * (until - since), 20, tint(source))
            page.text(135 + 72 * until, 208 + 26 * step, f"{number} is here")
        start += 1
    page.text(20, 318, "asked for,\non its way")
    page.text(20, 426, "multiplied")
    page.arrow((130, 455), (760, 455))
    page.text(765, 455, "time")
    return page


def choice() -> Page:
    """Draw the estimates of all ways for three shapes, and how ranks are matched to workers."""
    page, y = Page(650), 44.0
    page.title(20, 18, "Estimated seconds on 4 workers, by the default constants of the cost model")
    for title, (m, n, k) in {
        "square: m = n = k = 16000": (16000, 16000, 16000),
        "tall A: m = 400000, n = k = 1000": (400000, 1000, 1000),
        "long k: k = 400000, m = n = 1000": (1000, 1000, 400000),
    }.items():
        rows, cols, depth = (even(size // max(1000, size // 20), max(1000, size // 20))[0] for size in (m, n, k))
        made = plan(make_problem((rows, depth), (depth, cols)), FOUR)
        ways = [e for e in made.alternatives if int(np.prod(e.grid)) == 4]
        page.text(20, y, title, 9.5)
        for number, e in enumerate(ways):
            y += 23
            name, width = f"{e.method} {' x '.join(map(str, e.grid))}", 490 / max(e.seconds for e in ways)
            page.text(190, y, name, 9, "right", weight="normal" if number else "bold")
            page.box(200, y - 9, width * e.compute_seconds, 18, GREY)
            page.box(200 + width * e.compute_seconds, y - 9, width * e.transfer_seconds, 18, PALE)
            page.text(207 + width * e.seconds, y, f"{e.seconds:.2f} s")
        y += 34
    page.text(200, y - 10, "left, dark: multiplying; right, light: receiving and adding up")
    y += 30
    where = np.array([2, 2, 0, 0, 3, 3, 1, 1], np.int32).repeat(8)
    where[::7] = np.arange(10) % 4
    problem = make_problem(even(8, 1000), even(8, 1000), method="allgather")
    made = plan(problem, FOUR, {"a": where, "b": np.arange(64, dtype=np.int32) % 4})
    moved = traffic(made.problem.a.chunks, (made.rows, made.depth), where, 4).T * 8 / 2**20
    page.title(20, y, "MiB of A that a rank needs (rows) and a worker has (columns); outlined: the match")
    for rank, worker in itertools.product(range(4), repeat=2):
        x, top = 200 + 100 * worker, y + 36 + 26 * rank
        share, width = 0.9 * moved[rank, worker] / moved.max(), 2.4 if made.ranks[rank] == worker else 0.3
        page.box(x, top, 96, 22, tint(rank, share), width)
        page.text(x + 48, top + 11, f"{moved[rank, worker]:.0f}", 9.5, "center")
    for index in range(4):
        page.text(190, y + 47 + 26 * index, f"rank {index}", 9, "right")
        page.text(248 + 100 * index, y + 24, f"worker-{index}", 9, "center")
    return page


def run() -> Page:
    """Draw one run as a sequence diagram."""
    page = Page(655)
    lanes = dict(zip("cstexy", (60, 205, 350, 480, 620, 740), strict=True))
    labels = "client|scheduler|worker 1\nDask|worker 1\nengine thread|worker 2\nDask|worker 2\nengine thread"
    for x, label in zip(lanes.values(), labels.split("|"), strict=True):
        page.line((x, 50), (x, 645), color=GREY, width=0.7, style=":")
        page.box(x - 54, 10, 108, 40, PALE)
        page.text(x, 30, label, 8.5, "center", weight="bold")
    page.box(199, 168, 12, 389, GREY)
    page.text(184, 390, "the barrier waits in no-worker", 8.5, "center", rotation=90, color=GREY)
    gap = {"facecolor": WHITE, "edgecolor": "none", "pad": 0.4}
    for way, y, text in (
        ("cs", 78, "graph: compute D"), ("xs", 168, "in memory, all"), ("sy", 240, ""), ("se", 240, "vote?"),
        ("ys", 304, "yes, from all"), ("sy", 334, ""), ("se", 334, "start"), ("ex", 376, "fetch"),
        ("xe", 418, "chunks"), ("et", 456, ""), ("yx", 456, ""), ("xs", 524, "done, from all"),
        ("sc", 598, "D is in memory"), ("sx", 626, "finish, to all"),
    ):  # fmt: skip
        start, end = (lanes[lane] for lane in way)
        if {*way} == {"e", "x"}:
            start, end = (534, 686) if way == "ex" else (686, 534)
        page.arrow((start, y), (end, y), GREY if {*way} in ({"e", "x"}, {"e", "t"}, {"x", "y"}) else INK)
        middle = 277 if abs(end - start) > 200 else (start + end) / 2
        page.text(middle, y - 10, text, 9, "center", bbox=gap if text else None)
    for ways, y, height, fill, text in (
        ("s", 110, 38, PALE, "park the barrier;\ndoes it fit?"), ("tx", 126, 34, WHITE, "compute chunks\nof A and B"),
        ("s", 204, 38, PALE, "run number,\nplan, its turn"), ("ey", 268, 34, WHITE, "all chunks here?\nallocate"),
        ("ey", 398, 92, "#CCCCCC", "multiply\npanel by panel,\nadd up,\nhand over"),
        ("tx", 480, 34, WHITE, "keep chunks\nof D"), ("s", 557, 34, PALE, "tasks of D\nto memory"),
    ):  # fmt: skip
        for x in (lanes[lane] for lane in ways):
            page.box(x - 54, y - height / 2, 108, height, fill)
            page.text(x, y, text, 9, "center")
    return page


def blocks() -> Page:
    """Draw a block-cyclic layout, its local matrices, and the copies that make it from chunks."""
    layout, chunked = Layout((9, 10), (2, 2), ProcessGrid(2, 2)), Layout.of_chunks(((5, 4), (4, 6)))
    copies = list(redistribution(chunked, layout))
    page, cell, top = Page(380), 22, 70
    page.title(20, 28, "9 x 10 in blocks of 2 x 2\nover a 2 x 2 grid of ranks")
    page.title(280, 28, "What each rank holds:\nits blocks, pushed together")
    page.title(550, 28, f"From 2 x 2 chunks (thick):\n{len(copies)} rectangles to copy")
    for i, j in itertools.product(range(0, 9, 2), range(0, 10, 2)):
        rank, height = layout.owner(i, j), cell * min(2, 9 - i)
        (_, at_i), (_, at_j) = layout.rows.locate(i), layout.cols.locate(j)
        local = 280 + 142 * (rank % 2) + cell * int(at_j), top + 130 * (rank // 2) + cell * int(at_i)
        for (x, y), label in (((20 + cell * j, top + cell * i), str(rank)), (local, f"{i},{j}")):
            page.box(x, y, 2 * cell, height, RANKS[rank])
            page.text(x + cell, y + height / 2, label, 9, "center", color=on(rank))
    for copy in copies:
        page.box(550 + cell * copy.col, top + cell * copy.row, cell * copy.ncols, cell * copy.nrows, RANKS[copy.dst])
    for i, j in itertools.product(range(2), repeat=2):
        (row, height), (col, width) = (
            (axis.bounds[at], axis.bounds[at + 1] - axis.bounds[at])
            for axis, at in ((chunked.rows, i), (chunked.cols, j))
        )
        page.box(550 + cell * col, top + cell * row, cell * width, cell * height, width=3.2)
    page.text(20, 345, "Number and colour: the rank\nthat holds the block")
    page.text(280, 345, "Numbers: row and column of the\nblock's first element")
    page.text(550, 345, "A rectangle ends where a chunk\nor a block ends")
    return page


@dataclasses.dataclass
class Work:
    """What a rank does with a panel: it is factorized, or applied."""

    rank: int
    panel: int
    factors: bool
    ahead: bool
    begin: float
    end: float


def timeline(program: FactorPlacement) -> list[Work]:
    """Return all work of an LU factorization, if each rank takes its steps as soon as it can."""
    clocks, published, found = [0.0] * program.count, dict[Any, float](), dict[int, list[Work]]()
    for rank, step in in_any_order([program.steps(rank) for rank in range(program.count)], {}):
        if isinstance(step, Pull):
            clocks[rank] = max(clocks[rank], published[step.key])
        elif isinstance(step, Publish):
            published[step.key] = clocks[rank]
        elif isinstance(step, Call) and flops_of(step) + (step.kernel == "laswp"):
            factors, work = step.kernel == "getrf", found.setdefault(rank, [])
            if factors or step.kernel == "laswp":
                extra = step.makes[0] if factors else step.arguments[1]
                ahead = step.lane in ("ahead", "panel")
                work.append(Work(rank, int(extra.name.split(".")[1]), factors, ahead, clocks[rank], clocks[rank]))
            # Panels have a fifth of a product's rate.
            clocks[rank] += flops_of(step) * (5 if factors else 1)
            work[-1].end = clocks[rank]
    return [one for work in found.values() for one in work]


def lookahead() -> Page:
    """Draw when each rank takes the steps of an LU factorization."""
    task, a = Factorization("lu", (120, 120), "float64"), NamedMatrix("a", ((120,), (120,)), "float64")
    problem = FactorProblem(name="lu", task=task, matrices=(a,), wanted=(), options=read_options())
    program = FactorPlacement(
        problem=problem, engine="numpy", method="columns", participants=FOUR[:3], ranks=(0, 1, 2), width=10, owners={}
    )
    work, page, top, height = timeline(program), Page(310), 92, 46
    last, columns = max(one.end for one in work), program.columns
    page.title(20, 28, "The steps of an LU factorization of 12 block columns on 3 ranks")
    page.text(20, 52, "F3: panel 3 is factorized. 3: it is applied. Thick frames: steps that the next panel waits for.")
    page.text(20, 68, "Colour: the rank that has the panel. White: the rank waits.")
    for rank in range(program.count):
        page.disc(34, top + 62 * rank + height / 2, rank)
    for one in work:
        x, y, width = 60 + 720 * one.begin / last, top + 62 * one.rank, 720 * (one.end - one.begin) / last
        owner = columns.owner(one.panel)
        page.box(x, y, width, height, RANKS[owner] if one.factors else tint(owner), 1.6 if one.ahead else 0.5)
        letter = "F" if one.factors else ""
        if width > 11:
            color = on(owner) if letter else INK
            page.text(x + width / 2, y + height / 2, f"{letter}{one.panel}", 8, "center", color=color)
    page.arrow((60, 280), (780, 280))
    page.text(780, 294, "time", 9, "right")
    return page


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write PNGs there, and no SVG")
    png = parser.parse_args().png
    folder, suffix = (png, "png") if png else (Path(__file__).parent / "pictures", "svg")
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams.update({"svg.hashsalt": "dask_distmm", "svg.fonttype": "none"})
    for draw in (why, box, methods, cuts, walk, choice, run, blocks, lookahead):
        path = folder / f"{draw.__name__}.{suffix}"
        draw().figure.savefig(path, dpi=100, metadata=None if png else {"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
