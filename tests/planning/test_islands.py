"""Islands of GPUs that read each other's memory, and what ranks get from others."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from conformance import make_problem, random_chunks
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.planning import ENGINES, Plan, Worker, plan
from dask_distmm.planning.computation import islands
from dask_distmm.planning.schedule import imports, peer_reads

# Hosts of GPUs; a process sees all of its host's, or its own.
gpus = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=9)


def worker(number, host, device, sees_all):
    reach = tuple(f"gpu{other}" for other in range(4) if other != device) if sees_all else ()
    return Worker(f"w{number}", host=f"host{host}", device=f"gpu{device}", reach=reach)


@given(gpus)
def test_those_of_an_island_read_each_other(said):
    workers = [worker(number, *one) for number, one in enumerate(said)]
    found = islands(tuple(workers))
    assert all(found[first] == first for first in found)
    for (i, one), (j, other) in itertools.product(enumerate(workers), repeat=2):
        both = one.reaches(other) and other.reaches(one)
        assert found[i] != found[j] or both
        # Who has said the same as others is where they are.
        assert dataclasses.replace(one, address="") != dataclasses.replace(other, address="") or found[i] == found[j]
    assert ENGINES["peer"].unfit(workers, "product", joined=True) == ""


@given(gpus, st.integers(0, 3), st.integers(0, 2**32 - 1), st.sampled_from(["auto", "summa", "allgather", "allreduce"]))
def test_each_island_gets_what_its_ranks_need_once(said, others, seed, method):
    rng = np.random.default_rng(seed)
    m, n, k = rng.integers(1, 60, 3)
    a, b = (random_chunks(rng, m, 5), random_chunks(rng, k, 5)), (random_chunks(rng, k, 5), random_chunks(rng, n, 5))
    workers = [worker(number, *one) for number, one in enumerate(said)]
    sources = [Worker(f"s{number}", host="host0") for number in range(others)]
    counts = {"a": len(a[0]) * len(a[1]), "b": len(b[0]) * len(b[1])}
    where = {name: rng.integers(0, len(said) + others, count).astype(np.int32) for name, count in counts.items()}
    made = plan(
        make_problem(a, b, method=method if len(said) > 1 else "auto"), workers, where, sources=sources, engine="peer"
    )
    assert made.meets == (len({*made.islands[list(made.ranks)].tolist()}) > 1)
    for name in "ab":
        rows = imports(made).get(name, np.full((len(made.participants), counts[name]), -1))
        needed = {index: set(made.needed(rank, name).tolist()) for rank, index in enumerate(made.ranks)}
        for index, chunk in np.ndindex(*rows.shape):
            island, holder = made.islands[index], int(where[name][chunk])
            wanted = [at for at in made.ranks if made.islands[at] == island and chunk in needed[at]]
            elsewhere = holder in made.ranks and made.islands[holder] != island
            if wanted and elsewhere:
                assert rows[index, chunk] in wanted
                assert rows[index, chunk] == rows[island, chunk]
            else:
                assert rows[index, chunk] == -1
        read = peer_reads(made, "ab")[name]
        for index, chunk in np.ndindex(*read.shape):
            near = [at for at in made.ranks if at != index and made.islands[at] == made.islands[index]]
            assert read[index, chunk] == (where[name][chunk] == index and any(chunk in needed[at] for at in near))


def test_what_one_island_has_is_not_imported():
    problem = make_problem(((4, 4), (6,)), ((6,), (8,)), method="allgather")
    where = {"a": np.array([0, 1], np.int32), "b": np.array([1], np.int32)}
    made = plan(problem, [Worker("w0", host="h"), Worker("w1", host="h")], where, engine="peer")
    assert not made.meets
    assert imports(made) == {}
    apart = dataclasses.replace(
        made, participants=(made.participants[0], dataclasses.replace(made.participants[1], host="x"))
    )
    assert apart.meets
    assert {name: rows.tolist() for name, rows in imports(apart).items()} == {"a": [[-1, -1]] * 2, "b": [[0], [-1]]}
    assert imports(dataclasses.replace(apart, from_host=True)) == {}
    assert not dataclasses.replace(apart, engine="numpy").meets
    assert dataclasses.replace(made, engine="cublasmp").meets


def test_islands_are_dear():
    """What comes from others takes longer: what one GPU does soon is done by one, or by an island."""
    n = 4096
    problem = make_problem(((n // 4,) * 4, (n,)), ((n,), (n // 4,) * 4), array="cupy")
    where = dict.fromkeys("ab", np.arange(4, dtype=np.int32))

    def ranks(hosts):
        workers = [Worker(f"w{i}", host=f"h{i // (4 // hosts)}", memory_limit=2**37) for i in range(4)]
        made = plan(problem, workers, where, engine="peer")
        assert isinstance(made, Plan)
        return made

    assert len(ranks(1).ranks) == 4
    assert ranks(2).estimate.seconds > ranks(1).estimate.seconds
    large = plan(
        make_problem(((2**14,) * 4, (2**16,)), ((2**16,), (2**14,) * 4), array="cupy"),
        [Worker(f"w{i}", host=f"h{i // 2}", memory_limit=2**40) for i in range(4)], where, engine="peer",
    )  # fmt: skip
    assert len(large.ranks) == 4
    assert large.meets
