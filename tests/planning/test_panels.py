from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from conformance import make_problem, random_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.config import read_options
from dask_distmm.planning import METHODS, Worker, plan
from dask_distmm.planning.cuts import pieces_of
from dask_distmm.planning.groups import panels


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(METHODS), st.integers(1, 6))
def test_every_needed_element_is_in_one_piece(seed, method, nworkers):
    rng = np.random.default_rng(seed)
    m, n, k = (int(x) for x in rng.integers(1, 60, 3))
    options = dataclasses.replace(read_options(), panel_bytes=int(rng.integers(1, 4000)))
    a = (random_chunks(rng, m, 5), random_chunks(rng, k, 5))
    b = (random_chunks(rng, k, 5), random_chunks(rng, n, 5))
    problem = make_problem(a, b, method=method, options=options)
    where = [rng.integers(0, nworkers, len(c[0]) * len(c[1])).astype(np.int32) for c in (a, b)]
    made = plan(problem, [Worker(f"w{i}") for i in range(nworkers)], where={"a": where[0], "b": where[1]})
    starts = [[np.cumsum([0, *sizes]) for sizes in chunks] for chunks in (a, b)]
    for rank, me in enumerate(made.ranks):
        r0, r1, c0, c1 = made.region(rank)
        k0, k1 = made.k_range(rank)
        counts = (np.zeros((m, k), int), np.zeros((k, n), int))
        walked = panels(made, rank)
        assert sorted((p.k0, p.k1) for p in walked) == sorted({(p.k0, p.k1) for p in walked})
        assert sum(p.k1 - p.k0 for p in walked) == k1 - k0
        remote_seen = False
        for panel in walked:
            remote_seen |= bool(panel.remote)
            assert bool(panel.remote) == remote_seen, "a panel that needs nothing comes after one that does"
            for holder, pieces in [(me, panel.local), *panel.remote.items()]:
                for p in itertools.chain(*pieces):
                    chunk_row, chunk_col = divmod(p.chunk, len((a, b)[p.operand][1]))
                    assert where[p.operand][p.chunk] == holder
                    assert p.row == starts[p.operand][0][chunk_row] + p.r0
                    assert p.col == starts[p.operand][1][chunk_col] + p.c0
                    counts[p.operand][p.row : p.row + p.rows, p.col : p.col + p.cols] += 1
                    along_k = (p.col, p.cols) if p.operand == 0 else (p.row, p.rows)
                    assert panel.k0 <= along_k[0]
                    assert along_k[0] + along_k[1] <= panel.k1
        expected = (np.zeros((m, k), int), np.zeros((k, n), int))
        expected[0][r0:r1, k0:k1] = 1
        expected[1][k0:k1, c0:c1] = 1
        for found, wanted in zip(counts, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_pieces_of_chunks(seed):
    rng = np.random.default_rng(seed)
    m, n = (int(x) for x in rng.integers(1, 40, 2))
    problem = make_problem((random_chunks(rng, m, 5), (3,)), ((3,), random_chunks(rng, n, 5)))
    made = plan(problem, [Worker("w")])
    r0, c0 = int(rng.integers(0, m)), int(rng.integers(0, n))
    rect = (r0, int(rng.integers(r0 + 1, m + 1)), c0, int(rng.integers(c0 + 1, n + 1)))
    count = np.zeros((m, n), int)
    for index, (a0, a1, b0, b1) in pieces_of(made.chunk_cuts, rect):
        e0, e1, f0, f1 = made.chunk_rect(index)
        assert e0 <= a0 < a1 <= e1
        assert f0 <= b0 < b1 <= f1
        count[a0:a1, b0:b1] += 1
    assert count.sum() == (rect[1] - rect[0]) * (rect[3] - rect[2])
    assert (count[rect[0] : rect[1], rect[2] : rect[3]] == 1).all()
