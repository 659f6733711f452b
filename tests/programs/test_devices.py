"""Programs' kernels on a stand-in for CuPy that refuses to mix, in all branches."""

from __future__ import annotations

import sys
import types

import dask.array as da
import numpy as np
import pytest
import strict_cupy
from matrices import problem_of

from dask_distmm import linalg
from dask_distmm.engines.base import Side
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs import evaluate
from dask_distmm.engines.programs.job import Memory, ProgramJob
from dask_distmm.engines.programs.kernels import ProgramKernels
from dask_distmm.planning.computation import Worker
from dask_distmm.planning.program import plan_program


class StrictMemory(Memory):
    def handed_over(self, array, *, tall):
        assert isinstance(array, strict_cupy.ndarray | np.ndarray)
        return array


def run_strictly(monkeypatch, made, operands):
    """Run what makes a result, of operands in four chunks of rows, on one rank."""
    for name, module in strict_cupy.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    # Each statement by itself, not by CUDA kernels that are made of several.
    monkeypatch.setattr(evaluate, "groups", lambda statements, kinds, kept: statements)
    problem = problem_of(made)
    chunks = {
        (name, number): strict_cupy.ndarray(part)
        for name in problem.operands
        # Vectors of traced functions have its own names.
        for number, part in enumerate(np.split(operands[name if name in operands else "m"], 4))
    }
    kernels = strict_cupy.Kernels(LapackKernels())
    plan = plan_program(problem, [Worker("here")], engine="numpy")
    job = ProgramJob(Side(plan, 0, chunks, None), kernels, StrictMemory())
    job.prepare()
    assert job.execute()


def test_kernels_do_not_mix(monkeypatch):
    rng = np.random.default_rng()
    for condition in (1, 1e3, 1e12):
        u, v = (np.linalg.qr(rng.standard_normal((size, 6)))[0] for size in (200, 6))
        operands = {"a": (u * np.geomspace(1, 1 / condition, 6)) @ v.T, "b": rng.standard_normal((200, 2))}
        x, y = (da.from_array(one, chunks=(50, -1)) for one in operands.values())
        for made in (
            linalg.qr(x).Q, linalg.qr(x, "r"), linalg.svd(x, full_matrices=False).U, linalg.svdvals(x),
            linalg.lstsq(x, y)[0], linalg.lstsq(x, y, 1e-8)[0], linalg.ridge(x, y, [0.0, 1.0]), linalg.pinv(x),
            linalg.ridge(x, y, 1.0, fit_intercept=True).coef, linalg.pinv(x, 1e-8), linalg.pca(x, 3)[0],
            linalg.svd_compressed(x, 3, n_power_iter=1)[0],
        ):  # fmt: skip
            run_strictly(monkeypatch, made, operands)


def test_kernels_of_iterations_do_not_mix(monkeypatch):
    rng = np.random.default_rng()
    a, b = rng.standard_normal((20, 20)), rng.standard_normal((20, 1))
    operands = {"a": a @ a.T + np.eye(20), "b": b, "g": b, "m": b**2}
    x, y = (da.from_array(operands[name], chunks=(5, -1)) for name in "ab")
    for made in (
        linalg.cg(x, y)[0], linalg.cg(x, y, y, M=y[:, 0] ** 2)[0], linalg.minres(x, y, y, shift=0.5, M=y[:, 0] ** 2)[0],
        linalg.gmres(x, y, y, restart=4)[0], linalg.eigsh(x, 2, ncv=5)[0], linalg.lobpcg(x, y)[0],
        linalg.lsqr(x, y, calc_var=True)[1], linalg.lsmr(x, y)[0], linalg.expm(x, method="rows"),
    ):  # fmt: skip
        run_strictly(monkeypatch, made, operands)
    operands["a"] = b
    functions = (lambda x, rows: 3 * x[rows], lambda u, rows: sys.modules["cupy"].zeros((20, 1)) + u[0])
    for made in (
        linalg.cg(functions[0], y)[0], linalg.lobpcg(lambda x, rows: x[rows], y)[0],
        linalg.lsqr(functions, y, x0=y[:, 0])[1], linalg.cg(functions[0], y, callback=abs)[0],
        linalg.gmres(functions[0], y, callback=abs, callback_type="x")[0],
        linalg.gmres(functions[0], y, callback=abs, callback_type="pr_norm")[0],
    ):  # fmt: skip
        run_strictly(monkeypatch, made, operands)


@pytest.mark.parametrize("shape", [(100_003, 3), (70_000, 1), (40, 5000), (1, 4), (0, 3), (5, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_sums_of_columns_are_put_together_from_parts_of_rows(shape, order):
    x = np.asarray(np.random.default_rng().integers(-9, 9, shape), "float64", order=order)
    kernels = ProgramKernels(types.SimpleNamespace(asynchronous=True, xp=np))
    np.testing.assert_array_equal(kernels._column_sums(x), x.sum(axis=0))
