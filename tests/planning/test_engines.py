"""A new engine is one module: this one has an engine of its own, and multiplies with it."""

from __future__ import annotations

import sys

import dask.array as da
import numpy as np
import pytest
from conformance import assert_product
from distributed import Client, LocalCluster
from leaks import assert_nothing_left

from dask_distmm import EngineError, PlanError, explain, matmul
from dask_distmm.engines.base import Job
from dask_distmm.planning import ENGINES, NumpyModel
from dask_distmm.planning.model import engine_alone, models_of
from dask_distmm.planning.placement import EVERYWHERE

used = []


class ToyJob(Job):
    """One rank has all of A and B sent to it, and multiplies them in one go."""

    def prepare(self):
        pass

    def execute(self):
        if self.me not in self.plan.ranks:
            return {}
        used.append(self.plan.problem.name)
        d = self._whole("a") @ self._whole("b")
        return {("", number): d[r0:r1, c0:c1].copy() for number, (r0, r1, c0, c1) in self._places("d")}

    def _places(self, operand):
        rows, cols = (np.cumsum((0, *sizes)).tolist() for sizes in self.plan.problem[operand].chunks)
        for number in range((len(rows) - 1) * (len(cols) - 1)):
            i, j = divmod(number, len(cols) - 1)
            yield number, (rows[i], rows[i + 1], cols[j], cols[j + 1])

    def _whole(self, operand):
        problem = self.plan.problem
        whole = np.empty([sum(sizes) for sizes in problem[operand].chunks], problem.compute_type)
        for number, (r0, r1, c0, c1) in self._places(operand):
            holder = int(self.plan.where[operand][number])
            if holder in (self.me, EVERYWHERE):
                whole[r0:r1, c0:c1] = self.chunks[operand, number]
            else:
                boxes = np.array([("ab".index(operand), number, 0, r1 - r0, 0, c1 - c0)])
                whole[r0:r1, c0:c1] = self.comm.fetch(holder, "input", boxes).result()[0]
        return whole


class ToyModel(NumpyModel):
    def takes(self, array, dtypes):
        return array == "numpy" and set(dtypes) == {"float64"}

    def has_method(self, problem, method):
        return method == "local"


class ToyEngine:
    name = "toy"

    def versions(self):
        return {"toy": "1"}

    def memory(self):
        return 0

    def links(self):
        return "", ()

    def job(self, side):
        return ToyJob(side)

    def release(self, group):
        pass

    def abandon(self, group):
        pass


ENGINE = ToyEngine()


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(sys.modules, "toy_engine", sys.modules[__name__])
    monkeypatch.setitem(ENGINES, "toy", ToyModel("toy", "toy_engine"))


def test_an_engine_in_one_module(toy):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        rng = np.random.default_rng()
        a, b = rng.standard_normal((90, 70)), rng.standard_normal((70, 50))
        x, y = (client.persist(da.from_array(array, chunks=(30, 20))) for array in (a, b))
        made = explain(x, y, engine="toy")
        assert (made.engine, made.method) == ("toy", "local")
        d = matmul(x, y, engine="toy")
        assert_product(a, b, d.compute())
        assert used == [d.name]
        with pytest.raises(PlanError, match="'allgather'"):
            explain(x, y, engine="toy", method="allgather")
        # It takes float64 alone, and is not preferred where others can.
        assert explain(x.astype("float32"), y.astype("float32")).engine == "numpy"
        assert explain(x, y, method="allgather").engine == "numpy"
        del d, x, y
        assert_nothing_left(client)


def test_an_unknown_engine_is_named():
    with pytest.raises(EngineError, match="unknown engine 'toy'; known are 'peer', 'cublasmp', 'nccl', 'numpy'"):
        models_of(["numpy", "toy"])


def test_the_engine_where_there_is_no_cluster():
    assert [engine_alone(array) for array in ("numpy", "cupy")] == ["numpy", "cublasmp"]
