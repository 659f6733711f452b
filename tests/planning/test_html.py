"""A plan as HTML: well-formed for every plan, nothing but shapes and text, every rank labelled."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree as ET

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm import BatchPlan, NotCollective, Plan, cond, explain, jit, while_loop
from dask_distmm.errors import PlanError
from dask_distmm.planning import METHODS
from dask_distmm.planning.many import GroupPlan, Share
from dask_distmm.show.html import coarse, label

SVG = "{http://www.w3.org/2000/svg}"


def parsed(html: str) -> ET.Element:
    """Return the elements, after what no page of ours may have."""
    assert not re.search(r"<script|javascript:|\son\w+=|https?://(?!www\.w3\.org/2000/svg)", html)
    return ET.fromstring(html)


def words(root: ET.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())


def plan_of(shape: tuple[int, int, int], chunks: tuple[int, int, int], workers: int, **options: object) -> Plan:
    (m, k, n), (cm, ck, cn) = shape, chunks
    found = explain(da.ones((m, k), chunks=(cm, ck)), da.ones((k, n), chunks=(ck, cn)), workers=workers, **options)
    assert isinstance(found, Plan)
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.integers(1, 300)] * 3),
    st.tuples(*[st.integers(5, 300)] * 3),
    st.integers(1, 20),
    st.sampled_from(METHODS),
    st.sampled_from(["numpy", "cublasmp"]),
)
def test_every_plan_is_drawn(
    shape: tuple[int, int, int], chunks: tuple[int, int, int], workers: int, method: str, engine: str
) -> None:
    try:
        plan = plan_of(shape, chunks, workers, method=method, engine=engine)
    except PlanError:  # this engine has no such method for it
        return
    root = parsed(plan._repr_html_())
    pictures = root.findall(f".//{SVG}svg[@role='img']")
    assert len(pictures) == 4
    assert all(picture.get("aria-label") for picture in pictures)
    for picture in pictures:
        width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
        for rect in picture.iter(f"{SVG}rect"):
            x, y, w, h = (float(rect.get(name, -1)) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width + 0.2
            assert 0 <= y <= y + h <= height + 0.2
    text = words(root)
    for rank, address in list(enumerate(plan.workers))[:16]:
        assert f"{rank}: {address}" in text
    assert plan.method in text
    assert repr(plan).splitlines()[3].split("  ")[1].strip() in text


def test_where_chunks_lie_is_coloured() -> None:
    plan = plan_of((60, 60, 60), (20, 20, 20), 4, method="summa")
    blank, drawn = (parsed(plan._repr_html_()).findall(f".//{SVG}svg[@role='img']")[at] for at in (0, 1))

    def fills(picture: ET.Element) -> set[str | None]:
        return {rect.get("fill") for rect in picture.iter(f"{SVG}rect")} - {"none"}

    assert "#DDDDDD" in fills(blank)  # A and B: not known yet
    assert len(fills(drawn)) == 4
    assert "#DDDDDD" not in fills(drawn)


def test_what_every_worker_has_is_striped() -> None:
    plan = plan_of((60, 60, 60), (60, 60, 60), 3, method="allgather")
    placed = dataclasses.replace(plan, where={"a": np.full(1, -1, np.int32), "b": np.zeros(1, np.int32)})
    picture = parsed(placed._repr_html_()).findall(f".//{SVG}svg[@role='img']")[0]
    labels = [text.text for text in picture.iter(f"{SVG}text")]
    assert "0, 1, 2" in labels


def test_names_of_workers_are_escaped() -> None:
    html = NotCollective("<b>why</b> & so on; do <i>this</i>")._repr_html_()
    assert words(parsed(html)).endswith("Why: <b>why</b> & so on What to change: do <i>this</i>")
    assert "What to change" not in NotCollective("no advice")._repr_html_()


def test_a_batch_is_drawn() -> None:
    a = da.ones((64, 16, 16), chunks=(8, 16, 16))
    for batch in ("items", "collective"):
        plan = explain(a, a, workers=3, batch=batch)
        assert isinstance(plan, BatchPlan)
        text = words(parsed(plan._repr_html_()))
        assert "whole items in plain tasks" in text
        assert ("Each run" in text) == (batch == "collective")


def test_a_group_is_drawn() -> None:
    run, slabs = Share(True, (), 0, 0.5), Share(False, (300, 200), 0, 0.01)
    small = [Share(False, (300,), 1 + i, 0.001) for i in range(40)]
    shapes = ((40_000, 500, 600), (500, 500, 600), *[(300, 500, 600)] * 40, (3, 3, 3))
    plan = GroupPlan(shapes, (run, slabs, *small, None), 8, 0.6)
    text = words(parsed(plan._repr_html_()))
    assert text.startswith("Group: 43 products, 1 by collective runs, 41 by plain tasks (in all 42)")
    assert "0: 40000 x 600 by 600 x 500" in text
    assert "2 slabs of up to 300 rows" in text
    assert "and 18 shorter ones" in text
    assert "42 3 x 3 by 3 x 3: by Dask's own function" in text
    assert "shorter ones" not in words(parsed(GroupPlan(shapes[:1], (run,), 8, 0.5)._repr_html_()))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=200))
def test_edges_are_thinned_out(sizes: list[int]) -> None:
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    found, step = coarse(edges)
    assert found[0] == 0
    assert found[-1] == edges[-1]
    assert found[:-1] == edges[:-1:step]
    assert len(found) <= 25
    assert (step == 1) == (len(sizes) <= 24)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 2), "0, 2"),
        ((1, 2, 3, 4), "1\N{EN DASH}4"),
        ((0, 2, 4, 6, 8), "0, 2, 4, 6\N{HORIZONTAL ELLIPSIS}"),
    ],
)
def test_labels_are_short(ranks: tuple[int, ...], text: str) -> None:
    assert label(ranks) == text


def test_statements_of_a_function_are_boxes_in_frames() -> None:
    def turn(i, state):
        w, error = state
        residual = X @ w - y
        w = cond(error > 1, lambda: w - X.T @ residual, lambda: w * 0.5)
        return w, (residual * residual).sum()

    X, y, w = da.ones((300, 4), chunks=(60, 4)), np.ones(300), np.ones(4)
    plan = explain(jit(lambda w, X: while_loop(lambda s: s[1] > 0, lambda s: turn(0, s), (w, 9.0))), w, X)
    root = parsed(plan._repr_html_())
    (picture,) = root.findall(f".//{SVG}svg[@aria-label='the statements, where values are, and what travels']")
    rows = [row for row in plan.problem.statements if row.kind]
    boxes = picture.findall(f"{SVG}g")
    assert [box.findall(f"{SVG}text")[0].text for box in boxes] == [row.what for row in rows]
    assert [box.find(f"{SVG}rect").get("stroke-width") == "3" for box in boxes] == [row.moved > 0 for row in rows]
    assert [box.find(f"{SVG}rect").get("fill") == "#56B4E9" for box in boxes] == [x.where[:4] == "rows" for x in rows]
    # A loop, and a branch in it, around all of their boxes.
    frames = picture.findall(f"{SVG}rect")
    assert len(frames) == 2
    width, height = float(picture.get("width")), float(picture.get("height"))
    for rect in picture.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert min(x, y) >= 0
        assert x + w <= width
        assert y + h <= height
    assert {"while_loop", "cond"} <= set(words(picture).split())
    lines = [text.text for text in picture.findall(f"{SVG}text")]
    assert lines.count("residual = X @ w - y") == 1
    assert any(line.startswith("plan = explain(jit(lambda w, X: while_loop(lambda s: s[1]") for line in lines)
