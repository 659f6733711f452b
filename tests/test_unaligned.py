"""Chunks that Dask's comms have left at odd addresses."""

from __future__ import annotations

import dask.array as da
import numpy as np
import scipy.sparse
from distributed import wait

from dask_distmm import matmul
from dask_distmm.engines.programs.region import packed, unpacked
from dask_distmm.runtime.chunks import aligned


def moved(x):
    """Return an array at an odd address, as those are that have travelled."""
    flat = np.frombuffer(bytearray(x.nbytes + 1), np.uint8, offset=1)
    there = flat.view(x.dtype).reshape(x.shape)
    there[...] = x
    assert not there.flags.aligned
    return there


def moved_bytes(x):
    there = np.empty(x.size + 1, np.uint8)[1:]
    there[...] = x
    return there


def test_copies_are_aligned():
    x = np.random.default_rng().random((5, 7))
    assert aligned(x) is x
    for array in (x, x.astype("complex64"), np.asfortranarray(x).T):
        got = aligned(moved(array))
        assert got.flags.aligned
        np.testing.assert_array_equal(got, array)
    sparse = scipy.sparse.csr_array(x)
    assert aligned(sparse) is sparse
    sparse.data = moved(sparse.data)
    got = aligned(sparse)
    assert got.data.flags.aligned
    np.testing.assert_array_equal(got.toarray(), x)


def test_values_of_tasks_that_other_ranks_send_are_aligned():
    value = [np.random.default_rng().random(9), "text", np.arange(3, dtype="complex128")]
    text, *buffers = packed(value)
    for there in (unpacked([text, *buffers]), unpacked([text, *map(moved_bytes, buffers)])):
        assert there[1] == "text"
        for got, expected in zip(there[::2], value[::2], strict=True):
            assert got.flags.aligned
            np.testing.assert_array_equal(got, expected)


def test_chunks_in_memory_are_aligned_by_a_run(inproc_client):
    """Once, for all runs and tasks that read them later."""
    x = np.random.default_rng().random((20, 30))
    lazy = da.from_array(x, chunks=(5, 30)).map_blocks(moved, dtype=float, meta=np.ones((1, 1))).persist()
    wait(lazy)

    def states(name, dask_worker):
        return [dask_worker.data[key].flags.aligned for key in dask_worker.data if key[0] == name]

    def all_states():
        return [state for states_there in inproc_client.run(states, lazy.name).values() for state in states_there]

    assert all_states() == [False] * 4
    np.testing.assert_allclose(matmul(lazy, lazy.T).compute(), x @ x.T)
    assert all_states() == [True] * 4
    np.testing.assert_array_equal(lazy.compute(), x)
