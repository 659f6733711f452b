"""Products of arrays of the package dask-array, run in a process of its own by ``test_integrations.py``."""

from __future__ import annotations

import dask
import dask.array as da
import dask_array
import numpy as np
from distributed import Client
from scripts import count_runs, raises

import dask_distmm


def close(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def check_linalg(client: Client, rng: np.random.Generator) -> None:
    a, b, tall = rng.standard_normal((40, 40)), rng.standard_normal((40, 3)), rng.standard_normal((200, 4))
    s = a @ a.T + 40 * np.eye(40)
    x, y, t, v = (dask_array.from_array(one, chunks=(20, one.shape[1])) for one in (a, b, tall, tall[:, :1]))
    p, r = dask_array.from_array(s, chunks=20), dask_array.from_array(a, chunks=20)
    ways = {
        "solve": (lambda: dask_array.linalg.solve(r, y), np.linalg.solve(a, b)),
        "np.solve": (lambda: np.linalg.solve(x, y), np.linalg.solve(a, b)),
        "inv": (lambda: dask_array.linalg.inv(r), np.linalg.inv(a)),
        "np.inv": (lambda: np.linalg.inv(x), np.linalg.inv(a)),
        "cholesky": (
            lambda: dask_array.linalg.cholesky(dask_array.from_array(s, chunks=(20, 7))),
            np.linalg.cholesky(s).T,
        ),
        "np.cholesky": (lambda: np.linalg.cholesky(p), np.linalg.cholesky(s)),
        "lstsq": (lambda: dask_array.linalg.lstsq(t, v)[0], np.linalg.lstsq(tall, tall[:, :1])[0]),
        "np.det": (lambda: np.linalg.det(x), np.linalg.det(a)),
        "np.eigvalsh": (lambda: np.linalg.eigvalsh(p), np.linalg.eigvalsh(s)),
        "np.eigh": (lambda: np.linalg.eigh(p)[0], np.linalg.eigvalsh(s)),
        "svd": (lambda: dask_array.linalg.svd(t)[1], np.linalg.svd(tall)[1]),
        "ours": (lambda: dask_distmm.linalg.svdvals(t), np.linalg.svd(tall)[1]),
    }
    runs = client.run_on_scheduler(count_runs)
    for name, (way, expected) in ways.items():
        found = way()
        assert isinstance(found, dask_array.Array), name
        np.testing.assert_allclose(found.compute(), expected, rtol=1e-7, atol=1e-9, err_msg=name)
        assert (runs := runs + 1) == client.run_on_scheduler(count_runs), name
    q, upper = np.linalg.qr(t)
    close((q @ upper).compute(), tall)


def check(client: Client) -> None:
    rng = np.random.default_rng()
    a, b = rng.standard_normal((60, 20)), rng.standard_normal((20, 20))
    s = da.from_array(b, chunks=10)
    x, y = dask_array.from_array(a, chunks=9), dask_array.from_array(b, chunks=8)
    names = ("matmul", "tensordot")
    before = [getattr(module, name) for module in (dask_array, dask_array.linalg) for name in names]
    ways = {
        "@": lambda: x @ y,
        "reflected": lambda: a @ y,
        "np.matmul": lambda: np.matmul(x, y),
        "np.dot": lambda: np.dot(x, y),
        "dot": lambda: x.dot(y),
        "matmul": lambda: dask_array.matmul(x, y),
        "tensordot": lambda: dask_array.tensordot(x, y, axes=1),
        "ours": lambda: dask_distmm.matmul(x, y),
        "transposed": lambda: dask_distmm.matmul(x.T, y, op_a="T"),
    }
    runs = client.run_on_scheduler(count_runs)
    with dask_distmm.enabled():
        for name, way in ways.items():
            c = way()
            assert isinstance(c, dask_array.Array), name
            close(c.compute(), a @ b)
            assert (runs := runs + 1) == client.run_on_scheduler(count_runs), name
        # Lazy before and after, persisted between.
        held = ((x + 1) @ y).persist()
        close(((held * 2)[:7] @ y.T).compute(), (((a + 1) @ b * 2) @ b.T)[:7])
        assert dask_distmm.explain(x, y).method
        check_linalg(client, rng)
        # Dask and the package both refuse a mixture.
        raises((TypeError, ValueError, NotImplementedError), lambda: x @ s)
    assert "dask_array" in raises(dask_distmm.PlanError, lambda: dask_distmm.matmul(x, s))
    assert [getattr(module, name) for module in (dask_array, dask_array.linalg) for name in names] == before
    d, aux = dask_distmm.matmul(x, y, epilog="relu_aux", result_amax=True)
    close(d.compute(), np.maximum(a @ b, 0))
    close(aux["result_amax"].compute(), np.maximum(a @ b, 0).max())


if __name__ == "__main__":
    with (
        dask.config.set({"distmm.minimum-flops": 0}),
        Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster_client,
    ):
        check(cluster_client)
