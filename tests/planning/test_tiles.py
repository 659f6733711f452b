"""Tiles for a collective library: cuBLASMp's rules hold, and a multiply on the stored matrices gives D."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import make_problem, random_chunks
from hypothesis import given
from hypothesis import strategies as st
from matrices import numroc, segments_of
from proof import check

from dask_distmm.numeric.epilogs import Formula
from dask_distmm.planning import NamedMatrix, Plan, Worker, plan
from dask_distmm.planning.cublasmp import make_tiles, tile_chunk
from dask_distmm.planning.cuts import uniform_cut
from dask_distmm.planning.groups import chunk_name
from dask_distmm.planning.placement import REPLICA
from dask_distmm.programs.check import ProgramError
from dask_distmm.programs.steps import Call, Drop, Store, Take, flops_of, meeting

METHODS = ["local", "allgather", "reducescatter", "allreduce", "summa"]


def any_plan(most_ranks, longest):
    """Give a test a method, a number of ranks, a shape, two memory orders and a seed."""
    return given(
        st.sampled_from(METHODS),
        st.integers(1, most_ranks),
        st.tuples(*[st.integers(1, longest)] * 3),
        st.tuples(*[st.sampled_from("CF")] * 2),
        st.integers(0, 2**32 - 1),
    )


def made_plan(rng, method, nranks, shape, orders, extras="", **options):
    m, n, k = shape
    chunks = [random_chunks(rng, size, 4) for size in (m, n, k)]
    kinds = {"c": (chunks[0], chunks[1]), "bias": ((1,), chunks[1]) if rng.integers(2) else (chunks[0], (1,))}
    options["extras"] = tuple(NamedMatrix(name, kinds[name], "float64") for name in extras.split())
    problem = make_problem((chunks[0], chunks[2]), (chunks[2], chunks[1]), method=method, **options)
    where = {x.name: rng.integers(0, nranks, x.count).astype(np.int32) for x in problem.matrices}
    roster = [Worker(f"w{i}", 1, 0, "host") for i in range(nranks)]
    made = plan(problem, roster, where, engine="cublasmp", orders=orders)
    return Plan.from_wire(made.to_wire())


@any_plan(most_ranks=7, longest=40)
def test_rules_of_the_library(method, nranks, shape, orders, seed):
    made = made_plan(np.random.default_rng(seed), method, nranks, shape, orders)
    tiles = make_tiles(made)
    ranks = len(made.ranks)
    x, y = (tiles.b, tiles.a) if tiles.flipped else (tiles.a, tiles.b)
    op_x, op_y = tiles.ops
    stored = {"x": x.stored, "y": y.stored, "z": tiles.d.stored}

    def transposed(pair, op):
        return pair if op == "N" else pair[::-1]

    rows, inner = transposed(stored["x"].shape, op_x)
    same_inner, cols = transposed(stored["y"].shape, op_y)
    assert inner == same_inner
    assert stored["z"].shape == ((rows, cols * ranks) if tiles.replicated else (rows, cols))
    (mb, kb), (kb2, nb) = transposed(stored["x"].blocks, op_x), transposed(stored["y"].blocks, op_y)
    assert (mb, nb) == stored["z"].blocks
    assert kb == kb2
    for matrix, tile in ((stored["x"], x), (stored["y"], y), (stored["z"], tiles.d)):
        assert matrix.grid.size == ranks
        for rank in range(ranks):
            prow, pcol = matrix.grid.coords(rank)
            local = tuple(
                numroc(n, b, at, 0, count)
                for n, b, at, count in zip(
                    matrix.shape, matrix.blocks, (prow, pcol), (matrix.grid.nprow, matrix.grid.npcol), strict=True
                )
            )
            assert local == transposed(tile.local(rank), "N" if tile.order == "F" else "T")
            # Slabs are of one size, as the tuned paths demand.
            if made.method != "summa" and 1 not in (ranks,):
                assert tile.local(rank) == tile.local(0)
    if made.method == "allreduce":
        assert tiles.ops == ("T", "N")


@any_plan(most_ranks=6, longest=30)
def test_multiplying_what_is_stored_gives_d(method, nranks, shape, orders, seed):
    """Put the matrices together from padded tiles full of garbage, as the library sees them, and multiply."""
    rng = np.random.default_rng(seed)
    made = made_plan(rng, method, nranks, shape, orders)
    tiles = make_tiles(made)
    m, n, k = shape
    a, b = rng.integers(-9, 9, (m, k)).astype(float), rng.integers(-9, 9, (k, n)).astype(float)

    def stored(tile, matrix):
        whole = np.zeros(tile.shape) if tile.zeroed else np.full(tile.shape, 1e6)
        whole[: matrix.shape[0], : matrix.shape[1]] = matrix
        return whole if tile.order == "F" else whole.T

    x, y = (stored(tiles.b, b), stored(tiles.a, a)) if tiles.flipped else (stored(tiles.a, a), stored(tiles.b, b))
    z = (x if tiles.ops[0] == "N" else x.T) @ (y if tiles.ops[1] == "N" else y.T)
    d = z.T if tiles.flipped else z
    np.testing.assert_array_equal(d[:m, :n], a @ b)


@given(st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("method", METHODS)
def test_a_tile_that_is_one_chunk_is_found(method, seed):
    rng = np.random.default_rng(seed)
    nranks = int(rng.integers(1, 5))
    made = made_plan(rng, method, nranks, tuple(rng.integers(1, 9, 3).tolist()), ("C", "C"))
    tiles = make_tiles(made)
    problem = made.problem
    for tile, sizes, shape in (
        (tiles.a, problem.a.chunks, (problem.m, problem.k)),
        (tiles.b, problem.b.chunks, (problem.k, problem.n)),
    ):
        numbers = np.arange(shape[0] * shape[1]).reshape(shape)
        edges = [np.concatenate([[0], np.cumsum(s)]) for s in sizes]
        chunks = [
            numbers[r0:r1, c0:c1]
            for r0, r1 in zip(edges[0][:-1], edges[0][1:], strict=True)
            for c0, c1 in zip(edges[1][:-1], edges[1][1:], strict=True)
        ]
        for rank in range(len(made.ranks)):
            prow, pcol = tile.layout.grid.coords(rank)
            rows = [i for g, _, s in segments_of(tile.layout.rows, prow) for i in range(g, g + s)]
            cols = [i for g, _, s in segments_of(tile.layout.cols, pcol) for i in range(g, g + s)]
            held = numbers[np.ix_(rows, cols)]
            expected = [
                index
                for index, chunk in enumerate(chunks)
                if held.size and chunk.shape == held.shape == tile.local(rank) and (chunk == held).all()
            ]
            contiguous = all(
                len(segments_of(axis, part)) == 1 for axis, part in ((tile.layout.rows, prow), (tile.layout.cols, pcol))
            )
            assert tile_chunk(tile, rank, sizes) == (expected[0] if expected and contiguous else None)


@given(st.integers(1, 500), st.integers(1, 40))
def test_uniform_cuts(length, parts):
    cuts = uniform_cut(length, parts)
    sizes = np.diff(cuts)
    assert cuts[0] == 0
    assert cuts[-1] == length
    assert len(sizes) <= parts
    assert (sizes[:-1] == sizes[0]).all()
    assert 0 < sizes[-1] <= sizes[0] == -(-length // min(parts, length)) or sizes[0] == -(-length // parts)


def test_few_bytes_move_when_ranks_match_workers():
    """A and B lie in slabs in the same shuffled order: ranks take it, and nothing moves before the multiply."""
    n, order = 4096, np.array([2, 0, 3, 1], np.int32)
    problem = make_problem(((n // 4,) * 4, (n,)), ((n,), (n // 4,) * 4), method="allgather")
    roster = [Worker(f"w{i}", 1, 0, "host") for i in range(4)]
    made = plan(problem, roster, {"a": order, "b": order}, engine="cublasmp")
    assert made.ranks == tuple(order.tolist())
    gathered = 3 * n * n * 8
    assert made.bytes_moved - gathered <= n * n * 8  # D's own chunks are columns of slabs: nothing else
    again = plan(problem, roster, {"a": order, "b": order}, engine="cublasmp", groups=[("w0", "w1", "w2", "w3")])
    # Moving 64 MiB at 300 GB/s is quicker than making a communicator.
    assert again.ranks == (0, 1, 2, 3)


def lists_of(made, rng):
    """Return the lists of all ranks, with the chunks that they read; not all of these can be tiles."""
    lists = []
    for rank, me in enumerate(made.ranks):
        steps = made.steps(rank, usable=lambda operand, number: bool(rng.integers(2)))
        names = {
            chunk_name(name, i): (name, int(i)) for name in made.where for i in np.flatnonzero(made.where[name] == me)
        }
        used = {x.name: x for step in steps if isinstance(step, Call) for x in step.arguments if x.name in names}
        chunks = [Take(x, *names[x.name]) for x in used.values()]
        lists.append([*chunks, *steps, *(Drop(taken.buffer) for taken in chunks)])
    return lists


@any_plan(most_ranks=6, longest=60)
def test_lists_come_to_their_end_and_all_ranks_meet(method, nranks, shape, orders, seed):
    rng = np.random.default_rng(seed)
    changes = [
        {},
        {"formula": Formula(epilog="allreduce")},
        {"formula": Formula(epilog="gelu_aux_bias", beta=(1.0, 0.0)), "extras": "c bias"},
        {"formula": Formula(epilog="relu_bias"), "extras": "bias"},
    ][int(rng.integers(4))]
    made = made_plan(rng, method, nranks, shape, orders, **changes)
    lists = lists_of(made, rng)
    check(lists)
    flops = sum(flops_of(step) for steps in lists for step in steps if isinstance(step, Call))
    assert flops == pytest.approx(made.problem.flops)
    stored = [(step.output, step.number) for steps in lists for step in steps if isinstance(step, Store)]
    assert sorted(number for output, number in stored if not output) == list(range(made.problem.d.count))
    if made.problem.formula.replicated and len(made.ranks) > 1:
        assert len([0 for output, _ in stored if output == REPLICA]) == made.problem.d.count * (len(made.ranks) - 1)
    # A rank that leaves one of the steps out in which all meet, or has two of them in another order.
    at = [number for number, step in enumerate(lists[-1]) if meeting(step) is not None]
    first, second = rng.choice(at, 2, replace=False)
    if len(made.ranks) > 1:
        with pytest.raises(ProgramError):
            check([*lists[:-1], lists[-1][:first] + lists[-1][first + 1 :]])
        lists[-1][first], lists[-1][second] = lists[-1][second], lists[-1][first]
        with pytest.raises(ProgramError):
            check(lists)
