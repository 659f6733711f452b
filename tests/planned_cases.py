"""Products of arrays under query planning, run in a process of its own by ``test_collections.py``."""

from __future__ import annotations

import dask

dask.config.set({"array.query-planning": True, "distmm.minimum-flops": 1e18})

import dask.array as da  # noqa: E402
import numpy as np  # noqa: E402
from conformance import assert_product  # noqa: E402
from distributed import Client  # noqa: E402
from scripts import count_runs, raises  # noqa: E402

import dask_distmm  # noqa: E402
from dask_distmm import linalg  # noqa: E402


def main() -> None:
    rng = np.random.default_rng()
    a, b = rng.standard_normal((40, 30)), rng.standard_normal((30, 20))
    x, y = da.from_array(a, chunks=9), da.from_array(b, chunks=8)
    assert da.array_expr_enabled()
    raises(NotImplementedError, lambda: x @ y)
    # Without a cluster the barrier multiplies in this process.
    assert_product(a, b, dask_distmm.matmul(x, y).compute())
    with Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as client:
        ways = {
            "@": lambda: x @ y,
            "reflected": lambda: a @ y,
            "np.matmul": lambda: np.matmul(x, y),
            "da.matmul": lambda: da.matmul(x, y),
            "da.tensordot": lambda: da.tensordot(x, y, axes=1),
            "matmul": lambda: dask_distmm.matmul(x, y),
            "transposed": lambda: dask_distmm.matmul(x.T, y, op_a="T"),
        }
        runs = 0
        with dask_distmm.enabled():
            for name, way in ways.items():
                c = way()
                assert isinstance(c, da.Array), name
                assert_product(a, b, c.compute())
                assert (runs := runs + 1) == client.run_on_scheduler(count_runs), name
            # What comes before and after is planned by Dask.
            c = ((x + 1) @ y)[:5] * 2
            np.testing.assert_allclose(c.compute(), ((a + 1) @ b)[:5] * 2, rtol=1e-10, atol=1e-10)
            held = ((x @ y) + 1).persist()
            np.testing.assert_allclose((held.T @ x).compute(), (a @ b + 1).T @ a, rtol=1e-10, atol=1e-10)
            things = da.from_array(np.ones((4, 4), object), chunks=2)
            assert "object" in raises(dask_distmm.PlanError, lambda: things @ things)
            assert "batches" in raises(dask_distmm.PlanError, lambda: da.ones((2, 3, 3), chunks=3) @ da.ones((2, 3, 3)))
        raises(NotImplementedError, lambda: x @ y)
        d, aux = dask_distmm.matmul(x, y, y[:1] * 0 + 1, beta=2, epilog="relu_aux", result_amax=True)
        full = a @ b + 2
        np.testing.assert_allclose(d.compute(), np.maximum(full, 0), rtol=1e-10, atol=1e-10)
        assert (aux["relu_aux"].compute() == (full > 0)).all()
        np.testing.assert_allclose(float(aux["result_amax"].compute()), np.maximum(full, 0).max(), rtol=1e-10)
        assert dask_distmm.explain(x, y).method
        tall = da.from_array(rng.standard_normal((400, 5)), chunks=(50, 5))
        q, r = found = linalg.qr(tall)
        assert isinstance(found.Q, da.Array)
        np.testing.assert_allclose(q.compute() @ r.compute(), tall.compute(), atol=1e-12)
        assert linalg.explain(found).problem.kind == "program"
        assert linalg.explain(linalg.gram(x)).problem.kind == "product"
        assert linalg.explain(linalg.lu(x)[1]).problem.task.kind == "lu"
        assert len(linalg.explain(linalg.lu_solve(linalg.lu_factor(x[:30]), x[:30])).runs) == 3


if __name__ == "__main__":
    main()
