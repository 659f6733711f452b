"""Products that do not fit, in waves on a cluster: right, in bounded memory, in place, also where something fails."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import itertools
import os
import signal
import time

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from conformance import assert_product
from dask.array.optimization import optimize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.utils import key_split
from distributed import Client, LocalCluster, SchedulerPlugin, get_worker, wait
from leaks import assert_nothing_left
from matrices import until

import dask_distmm
from dask_distmm import ProjectedMemoryError, matmul
from dask_distmm.arrays.product import run_outputs
from dask_distmm.arrays.request import parse
from dask_distmm.config import dask_costs
from dask_distmm.graph import ProductLayer, can_be_made
from dask_distmm.planning import Plan, Worker
from dask_distmm.planning.waves import Budget, choose_scheme
from dask_distmm.runtime.keys import barrier_name, series_of_waves, wave_of


def in_waves(a, b, name="sums", lazy=(True, True), by_ranks=False, **options):
    """A product in waves of a certain scheme, as workers would make it that have so little memory that it is taken."""
    request = parse(a, b, **options)
    problem = request.problem
    for exponent in range(14, 30):
        workers = [Worker(f"w{number}", 1, 2**exponent) for number in range(2)]
        try:
            scheme = choose_scheme(
                problem, workers, lazy, Budget(0.6, 0.7, 1e6), dask_costs(), by_ranks=(by_ranks, by_ranks)
            )
        except ProjectedMemoryError:
            continue
        if scheme.name == name and len(scheme.waves) > 2 and scheme.by_ranks == by_ranks:
            return run_outputs(request, scheme)
    raise AssertionError(f"never in {name}")


@pytest.fixture(scope="module", autouse=True)
def whole_chunks():
    """Panels of tiny products are used as they lie, as those of large ones."""
    with dask.config.set({"distmm.numpy.pack-below": 0}):
        yield


def lazy(x, chunks):
    return da.from_array(x, chunks=chunks).map_blocks(np.copy, dtype=x.dtype)


SHAPES = {"sums": (60, 4000, 50), "rows": (4000, 60, 50), "cols": (50, 60, 4000), "blocks": (180, 180, 180)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product(sorted(SHAPES), ["float64", "int8"])]
    + [("blocks", dtype) for dtype in ("float32", "complex128", "int32", "float16")],
)
def test_every_scheme(inproc_client, name, dtype):
    rng = np.random.default_rng(5)
    m, k, n = SHAPES[name]
    a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((m, k), (k, n)))
    if dtype == "complex128":
        b = b * 1j
    cut = 60 if name == "blocks" else 300
    got = in_waves(lazy(a, cut), lazy(b, cut), name).compute()
    assert got.dtype == np.result_type(a, b)
    assert_product(a, b, got)


def stored(x, chunks, folder):
    """An array in a store, whose chunks ranks can read by themselves."""
    at = zarr.create_array(str(folder / f"{len(list(folder.iterdir()))}.zarr"), data=x, chunks=chunks)
    return da.from_zarr(at)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_every_scheme_by_ranks(inproc_client, tmp_path, name, dtype):
    """Ranks read chunks themselves: no task does, and what comes out is the same."""
    rng = np.random.default_rng(5)
    m, k, n = SHAPES[name]
    a, b = ((rng.standard_normal(shape) + 1j * rng.standard_normal(shape)) for shape in ((m, k), (k, n)))
    a, b = ((x if dtype == "complex64" else x.real).astype(dtype) for x in (a, b))
    cut = 60 if name == "blocks" else 300
    streamed = [stored(x, tuple(min(cut, size) for size in x.shape), tmp_path) for x in (a, b)]
    assert all(map(can_be_made, streamed))
    d = in_waves(*streamed, name, by_ranks=True)
    keys = {key_split(key) for key in dict(optimize(d.dask, list(flatten(d.__dask_keys__()))))}
    # A resident operand is loaded by Dask.
    assert len([key for key in keys if key.startswith("from-zarr")]) == (name in ("rows", "cols"))
    assert_product(a, b, d.compute())


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_gram_by_ranks(inproc_client, tmp_path, kind):
    """Each chunk is read once and used on both sides; D has several chunks; a part of D is a product of its own."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((2000, 90)) + (1j * rng.standard_normal((2000, 90)) if kind == "complex" else 0)
    lazy_x = stored(x, (300, 45), tmp_path)
    d = in_waves(lazy_x.T.conj(), lazy_x, by_ranks=True)
    assert_product(x.T.conj(), x, d.compute())
    assert_product(x.T.conj()[:45], x, d[:45].compute())


def test_operands_of_one_source_by_ranks(inproc_client):
    """A and B are made of the same chunks, and differ; who makes a chunk finds its worker, as a task does."""

    def found(part):
        assert get_worker().address
        return part

    x = da.random.default_rng(6).random((2000, 60), chunks=(300, 60))
    assert_product(x.T.compute(), x.compute(), in_waves(x.T, x.map_blocks(found, dtype=float), by_ranks=True).compute())
    expected = x.compute()
    d = in_waves((x + 1).T, x * 2, by_ranks=True)
    assert_product(expected.T + 1, expected * 2, d.compute())


@pytest.mark.parametrize("by_ranks", [False, True])
def test_an_array_times_itself(inproc_client, tmp_path, by_ranks):
    """Its chunks are A's and B's at different places of k."""
    x = np.random.default_rng(7).standard_normal((240, 240))
    lazy_x = stored(x, (60, 60), tmp_path)
    lazy_x = lazy_x if by_ranks else lazy_x + lazy_x.min() * 0
    assert_product(x, x, in_waves(lazy_x, lazy_x, "blocks", by_ranks=by_ranks).compute())


def test_gram_of_centered_columns(inproc_client):
    """The mean is shared, the transpose is a view, each chunk is loaded for the mean and for its wave."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((5000, 70))
    lazy_x = lazy(x, (250, 70))
    centered = lazy_x - lazy_x.mean(axis=0)
    d = in_waves(centered.T, centered)
    expected = x - x.mean(axis=0)
    assert_product(expected.T, expected, d.compute())


@pytest.mark.parametrize("by_ranks", [False, True])
def test_formula_and_outputs(inproc_client, tmp_path, by_ranks):
    """alpha, beta, C, bias and activation are applied once, at the end; auxiliary outputs come too."""
    rng = np.random.default_rng(7)
    for (m, k, n), name in (((60, 6000, 50), "sums"), ((6000, 60, 50), "rows")):
        a, b, c = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal((m, n))
        bias = rng.standard_normal(n)
        operands = [stored(x, (min(300, len(x)), min(300, x.shape[1])), tmp_path) for x in (a, b)]
        operands = operands if by_ranks else [lazy(a, 300), lazy(b, 300)]
        d, aux = in_waves(
            *operands, name, by_ranks=by_ranks, c=lazy(c, 300), alpha=0.5, beta=2.0,
            epilog="relu_aux_bias", epilog_inputs={"bias": bias},
        )  # fmt: skip
        x = 0.5 * a @ b + 2 * c + bias
        got, mask = dask.compute(d, aux["relu_aux"])
        np.testing.assert_allclose(got, np.maximum(x, 0), atol=1e-10)
        clear = abs(x) > 1e-9
        np.testing.assert_array_equal(mask[clear], (x > 0)[clear])


def test_lazy_operands_that_fit(client, tmp_path):
    """Ranks make their chunks while they multiply, if that takes long; under enable() Dask does what it streams."""
    a, b = np.random.default_rng().standard_normal((2, 600, 600))
    x, y = stored(a, (100, 200), tmp_path), stored(b, (200, 150), tmp_path)
    kept = client.persist(y)
    wait(kept)
    with dask.config.set({"distmm.waves.read-bandwidth": 1e6}):
        assert isinstance(dask_distmm.explain(kept, kept), Plan)
        for right in (y, kept):
            shown = dask_distmm.explain(x, right)
            assert shown.scheme.by_ranks
            d = matmul(x, right)
            assert any(wave_of(key) for key in map(barrier_name, dict(d.dask)) if key)
            assert_product(a, b, d.compute())
        # What others have a use for, too, is loaded once.
        assert isinstance(dask_distmm.explain(x - x.mean(axis=0), kept), Plan)
        with dask_distmm.enabled():
            small = da.from_array(b[:, :20].copy(), chunks=-1)
            assert not any(barrier_name(key) is not None for key in dict((x @ small).dask))
            with dask.config.set({"distmm.minimum-flops": 0}):
                assert any(barrier_name(key) is not None for key in dict((x @ small).dask))
                assert any(wave_of(key) for key in map(barrier_name, dict((x @ y).dask)) if key)
    assert_nothing_left(client)


def test_persisted_operands_and_parts(inproc_client):
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((6000, 60)), rng.standard_normal((60, 50))
    kept = inproc_client.persist(da.from_array(b, chunks=30))
    wait(kept)
    d = in_waves(lazy(a, 300), kept, "rows", (True, False))
    assert_product(a, b, d.compute())
    assert_product(a[:700], b, d[:700].compute())
    # D of one is an operand of the next.
    again = in_waves(d, lazy(b.T.copy(), 50), "rows")
    assert_product(a @ b, b.T, again.compute())


@pytest.mark.parametrize("persisted", [False, True])
def test_waves_come_in_their_order(inproc_client, persisted):
    """Also the blocks of D, no one of which needs another; and where nothing is loaded the runs themselves wait."""
    x = np.random.default_rng().standard_normal((240, 240))
    lazy_x = lazy(x, 60)
    if persisted:
        wait(lazy_x := inproc_client.persist(lazy_x))
    d = in_waves(lazy_x, lazy_x, "blocks")
    assert_product(x, x, d.compute())
    runs = [event["name"] for _, event in inproc_client.get_events("distmm") if event["action"] == "start"]
    found = [number for name, number in filter(None, map(wave_of, runs)) if name == d.name]
    assert len(found) > 4
    # A wave waits for the one before the last: neighbours may change places.
    assert sorted(found) == list(range(len(found)))
    assert all(abs(number - place) <= 1 for place, number in enumerate(found)), found


def test_annotations_of_what_is_loaded_hold(inproc_client):
    """Also those of tasks that have been held back."""
    here = sorted(inproc_client.scheduler_info()["workers"])[-1]

    def load(part):
        assert get_worker().address == here
        return part.copy()

    x = da.ones((6000, 60), chunks=(300, 60))
    with dask.annotate(workers=[here]):
        loaded = x.map_blocks(load, dtype=float)
    assert not can_be_made(loaded)
    d = in_waves(loaded.T, loaded)
    ((*waves,),) = series_of_waves(dict(d.dask))
    assert len(waves) > 4
    with dask.config.set({"optimization.fuse.active": False}):
        np.testing.assert_array_equal(d.compute(), np.full((60, 60), 6000.0))


def test_a_graph_that_comes_before_the_plugin():
    """Barriers run as ordinary tasks until the plugin is there; loads that wait for an idle worker go on."""
    for _ in range(3):
        with (
            LocalCluster(
                n_workers=4, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", memory_limit=0
            ) as cluster,
            Client(cluster) as client,
        ):
            rng = np.random.default_rng()
            a, b = rng.standard_normal((6000, 60)), rng.standard_normal((60, 50))
            kept = client.persist(da.from_array(b, chunks=30))
            wait(kept)
            assert_product(a, b, in_waves(lazy(a, 300), kept, "rows", (True, False)).compute())


@pytest.mark.parametrize("by_ranks", [False, True])
def test_without_a_cluster(tmp_path, by_ranks):
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((60, 6000)), rng.standard_normal((6000, 50))
    operands = [stored(a, (60, 300), tmp_path), stored(b, (300, 50), tmp_path)]
    d = in_waves(*(operands if by_ranks else [lazy(a, 300), lazy(b, 300)]), by_ranks=by_ranks)
    for scheduler in ("sync", "threads"):
        assert_product(a, b, d.compute(scheduler=scheduler))


def count_held(dask_scheduler):
    return len(dask_scheduler.extensions["distmm"].holds)


@pytest.mark.parametrize("by_ranks", [False, True])
def test_a_load_that_fails(inproc_client, by_ranks):
    """The source's own error comes out; nothing is left parked."""

    def read(x, block_info=None):
        if block_info[0]["chunk-location"][0] == 13:
            raise OSError("it is torn")
        return x.copy()

    x = da.ones((6000, 60), chunks=(300, 60)).map_blocks(read, dtype=float)
    d = in_waves(x.T, x, by_ranks=by_ranks)
    with pytest.raises(OSError, match="it is torn") as found:
        d.compute()
    if by_ranks:
        # B is made of the same chunk.
        (note,) = found.value.__notes__
        assert note.startswith("chunk (0, 13) of A can't be made on inproc://")
    assert_nothing_left(inproc_client)


@pytest.mark.parametrize("by_ranks", [False, True])
def test_cancel_frees_everything(inproc_client, by_ranks):
    def slow(x):
        time.sleep(0.05)
        return x.copy()

    x = da.ones((30_000, 60), chunks=(300, 60)).map_blocks(slow, dtype=float)
    d = in_waves(x.T, x, by_ranks=by_ranks)
    future = inproc_client.compute(d.persist())
    time.sleep(1)
    future.release()
    del future, d
    until(lambda: not inproc_client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))
    assert inproc_client.run_on_scheduler(count_held) == 0


def test_progress(inproc_client):
    """One line for the product, and no more for each wave."""
    x = da.random.default_rng(6).random((6000, 60), chunks=(300, 60))
    d = in_waves(x.T, x, by_ranks=True).persist()
    text = io.StringIO()
    dask_distmm.progress(d, file=text)
    lines = [line for line in text.getvalue().splitlines() if line.startswith("matmul-")]
    assert len({line.split()[0] for line in lines}) == 1
    assert "done" in lines[-1]
    ((*waves,),) = series_of_waves(in_waves(x.T, x, by_ranks=True).dask)
    count = len(waves)
    assert f"100%  {count} of {count} waves, 2.75 MiB loaded, 28.12 kiB of D made" in lines[-1]


@pytest.mark.parametrize("by_ranks", [False, True])
def test_chunks_of_d_that_leave_slowly(inproc_client, tmp_path, by_ranks):
    """A wave is not begun before the chunks of D of the wave before the last one have left memory."""
    a, b = np.ones((6000, 60)), np.ones((60, 50))
    d = in_waves(stored(a, (300, 60), tmp_path), stored(b, (60, 50), tmp_path), "rows", by_ranks=by_ranks)
    name = d.name

    def slow(part):
        time.sleep(0.05)
        return part[:1, :1]

    def watch(dask_scheduler):
        class Watch(SchedulerPlugin):
            most = 0

            def transition(self, key, start, finish, *args, **kwargs):
                if isinstance(key, tuple) and key[0] == name and finish == "memory":
                    found = sum(ts.state == "memory" for k, ts in dask_scheduler.tasks.items() if k[0] == name)
                    self.most = max(self.most, found)

        dask_scheduler.add_plugin(Watch(), name="watch")

    inproc_client.run_on_scheduler(watch)
    chunks = len(d.chunks[0])
    assert d.map_blocks(slow, chunks=((1,) * chunks, (1,))).sum().compute() == 60 * chunks
    most = inproc_client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins.pop("watch").most)
    assert 0 < most <= chunks // 2


def process_id(dask_worker):
    return os.getpid()


@pytest.mark.parametrize("by_ranks", [False, True])
def test_a_worker_dies(fault_client, by_ranks, tmp_path):
    """What it had is made again, and sums that had grown in place are not added twice."""
    x = da.random.default_rng(11).integers(-4, 4, (20_000, 120), chunks=(500, 120)).astype(float)
    expected = x.compute(scheduler="threads")

    dead, loaded = tmp_path / "dead", tmp_path / "loaded"

    def slow(part, block_info=None):
        # Half of the chunks come before it dies.
        if block_info[0]["chunk-location"][0] >= 20:
            loaded.touch()
            while not dead.exists():
                time.sleep(0.01)
        return part.copy()

    lazy_x = x.map_blocks(slow, dtype=float)
    d = in_waves(lazy_x.T, lazy_x, by_ranks=by_ranks)
    future = fault_client.compute(d)
    until(loaded.exists)
    assert not future.done()
    os.kill(next(iter(fault_client.run(process_id).values())), signal.SIGKILL)
    dead.touch()
    np.testing.assert_array_equal(future.result(timeout=120), expected.T @ expected)


@pytest.fixture(scope="module")
def small_cluster():
    """Two worker processes with so little memory that a few hundred MiB do not fit."""
    with LocalCluster(
        n_workers=2, threads_per_worker=1, memory_limit="400MiB", dashboard_address="127.0.0.1:0"
    ) as cluster:
        yield cluster


def spilled(dask_worker):
    return dask_worker.data.spilled_total.disk


def test_larger_than_memory(small_cluster, tmp_path):
    """matmul, and @ under enable(), take waves by themselves; nothing is spilled; D goes to a store."""
    with Client(small_cluster) as client:
        rng = da.random.default_rng(12)
        x = rng.random((200_000, 500), chunks=(2500, 500))  # 763 MiB
        with dask_distmm.enabled():
            # Dask's own tasks use each chunk at one time, and stream by themselves.
            assert not series_of_waves(dict((x.T @ x).dask))
            with dask.config.set({"distmm.minimum-flops": 0}):
                gram = x.T @ x
        v = np.eye(500, 20)
        product = matmul(x, da.from_array(v, chunks=-1))
        shown = dask_distmm.explain(x.T, x)
        assert shown.method == "waves"
        assert shown.scheme.peak_bytes <= shown.scheme.budget_bytes
        assert "scheme    sums" in repr(shown)
        assert "bound by" in shown._repr_html_()
        assert "which wave needs which parts" in shown._repr_html_()
        # Runs whose layers have tasks of other layers before them.
        assert len(dask_distmm.linalg.explain(dask_distmm.linalg.svd_compressed(x - x.mean(axis=0), 2)[1]).runs) > 3
        for d in (gram, product):
            assert series_of_waves(dict(d.dask))
        got = gram.compute()
        np.testing.assert_allclose(got, got.T)
        np.testing.assert_allclose(np.diag(got), 200_000 / 3, rtol=0.02)
        da.to_zarr(product, str(tmp_path / "d.zarr"))
        found = zarr.open(str(tmp_path / "d.zarr"))
        np.testing.assert_array_equal(found[:2500], x[:2500, :20].compute())
        assert sum(client.run(spilled).values()) == 0
        with dask.config.set({"distmm.waves.mode": "off"}), pytest.raises(ProjectedMemoryError):
            matmul(x.T, x)
        with dask.config.set({"distmm.waves.mode": "maybe"}), pytest.raises(dask_distmm.PlanError, match="'off'"):
            matmul(x.T, x)
        assert_nothing_left(client)


def test_persisted_operands_that_dask_has_spilled(tmp_path):
    """They are read back for their waves; nothing is killed, and neither operand is whole in memory."""
    limits = {"distributed.worker.memory.target": 0.2, "distributed.worker.memory.monitor-interval": "50ms"}
    with (
        dask.config.set(limits),
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="600MiB", dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        pids = client.run(process_id)
        shapes = (2100, 14_700), (14_700, 2100)
        a, b = client.persist([da.random.default_rng(m).random((m, n), chunks=700) for m, n in shapes])
        wait([a, b])
        assert sum(client.run(spilled).values()) > 0
        shown = dask_distmm.explain(a, b)
        assert shown.method == "waves"
        assert shown.scheme.streamed == (True, True)
        da.to_zarr(matmul(a, b), str(tmp_path / "d.zarr"))
        v = np.random.default_rng().standard_normal(2100)
        found = da.from_zarr(str(tmp_path / "d.zarr"))
        bound = 16 * np.finfo(float).eps * (a @ (b @ abs(v)))
        assert (abs(found @ v - a @ (b @ v)) <= bound).all().compute()
        assert client.run(process_id) == pids
        assert_nothing_left(client)


CALLS: collections.Counter = collections.Counter()


def counted(x, name, block_info=None):
    row, col = block_info[0]["chunk-location"]
    CALLS[name, (row, col)] += 1
    return x + np.arange(x.size).reshape(x.shape) % 7 - row - 2 * col


# What is taken of D, and of which rows and columns of chunks; None for all.
PARTS = {
    "a corner": (lambda d: d[:7, -7:], [0], [-1]),
    "an element": (lambda d: d[-1, 0], [-1], [0]),
    "some rows": (lambda d: d[:7], [0], None),
}


@pytest.mark.parametrize("by_ranks", [False, True])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_chunks_are_made_for_what_is_wanted(name, by_ranks):
    """Each of them once, however D is made: in waves, or as a run where the part is small."""
    m, k, n = SHAPES[name]
    cut = 60 if name == "blocks" else 300
    ones = da.ones((m, k), chunks=cut), da.ones((k, n), chunks=cut)
    x, y = (array.map_blocks(counted, of, dtype=float) for array, of in zip(ones, "ab", strict=True))
    a, b = dask.compute(x, y, scheduler="sync")
    d = in_waves(x, y, name, by_ranks=by_ranks)
    (layer,) = (one for one in d.dask.layers.values() if isinstance(one, ProductLayer))
    roomy = copy.copy(layer)
    roomy.scheme = dataclasses.replace(layer.scheme, budget_bytes=0)
    for part, (take, rows, cols) in PARTS.items():
        i, j = ([z % size for z in found or range(size)] for found, size in zip((rows, cols), d.numblocks, strict=True))
        made = {("a", (row, depth)) for row in i for depth in range(x.numblocks[1])}
        made |= {("b", (depth, col)) for depth in range(x.numblocks[1]) for col in j}
        for culled in (layer, roomy):
            graph = HighLevelGraph({**d.dask.layers, d.name: culled}, d.dask.dependencies)
            CALLS.clear()
            got = take(da.Array(graph, d.name, d.chunks, meta=d._meta)).compute(scheduler="sync")
            np.testing.assert_allclose(got, take(a @ b), err_msg=part)
            assert CALLS.keys() == made, part
            # Operands are read again for each block of D.
            assert set(CALLS.values()) == {1} or (name == "blocks" and culled is layer), part


def test_chunks_that_ranks_can_not_make_after_all(inproc_client):
    """Where a closer look shows that a chunk needs an array that lies in the graph Dask's tasks make them."""
    rng = np.random.default_rng(11)
    a, b = rng.standard_normal((60, 4000)), rng.standard_normal((4000, 50))
    d = in_waves(lazy(a, 300), lazy(b, 300), by_ranks=True)
    assert_product(a, b, d.compute())
    assert_product(a, b, d.compute(scheduler="sync"))
