"""Factorizations with a thread for each rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_distmm.comms.base import Boxes
from dask_distmm.engines.exchange import RankExchange
from dask_distmm.engines.numpy.blas import blas_threads
from dask_distmm.engines.numpy.lapack import LapackKernels
from dask_distmm.engines.programs.blas import Kernels
from dask_distmm.engines.programs.gathered import Execution, block_columns, whole
from dask_distmm.errors import PlanError
from dask_distmm.planning.factor.plan import FactorPlan
from dask_distmm.planning.factor.problem import Orientation


class LocalPanels:
    """`Comm` of ranks that are threads of one process: only for panels."""

    received_bytes = 0

    def __init__(self, copies: bool) -> None:
        self.exchanges: list[RankExchange] = []
        self._copies = copies

    def fetch(self, peer: int, kind: str, boxes: Boxes, flat: bool) -> Future[Sequence[Any]]:
        """Ask rank `peer` for a panel."""
        answer: Future[Sequence[Any]] = Future()

        def hand_over(published: Future[Sequence[Any]]) -> None:
            arrays = published.result()
            answer.set_result([x.copy(order="K") for x in arrays] if self._copies else arrays)

        self.exchanges[peer].published(kind, boxes).add_done_callback(hand_over)
        return answer


def run_factorization(
    plan: FactorPlan,
    a: NDArray[Any],
    b: NDArray[Any] | None = None,
    *,
    kernels: Kernels | None = None,
    copies: bool = True,
    timeout: float = 60.0,
) -> dict[str, NDArray[Any]]:
    """Run a plan with a thread for each rank; return all results by name, as a user gets them.

    Parameters
    ----------
    plan
        What is run.
    a, b
        The inputs, as a user gives them.
    kernels
        The arithmetic; None for NumPy's.
    copies
        Whether panels are copied on the way from rank to rank.
    timeout
        Seconds after which the ranks are taken to hang.

    Raises
    ------
    MatrixError
        As a rank raised it; all ranks have ended.
    TimeoutError
        The ranks hang.
    """
    kernels, failed, comm = kernels or LapackKernels(), threading.Event(), LocalPanels(copies)
    comm.exchanges += [RankExchange(range(plan.ranks), comm) for _ in range(plan.ranks)]

    def check() -> None:
        if failed.is_set():
            raise TimeoutError("another rank has failed")

    ranks = [Execution(plan, rank, kernels, exchange, check) for rank, exchange in enumerate(comm.exchanges)]
    for rank in ranks:
        _deal_out(rank, 0, a)
        if b is not None:
            _deal_out(rank, 1, b)
    with blas_threads(1), ThreadPoolExecutor(len(ranks)) as pool:
        runs = [pool.submit(rank.execute) for rank in ranks]
        finished, waiting = wait(runs, timeout, return_when=FIRST_EXCEPTION)
        errors = [error for run in finished if (error := run.exception())]
        if errors or waiting:
            failed.set()
            raise errors[0] if errors else TimeoutError(f"{len(waiting)} ranks hang")
    return {output.name: _collect(plan, ranks, output.name) for output in plan.problem.outputs}


def _oriented(x: NDArray[Any], orientation: Orientation) -> NDArray[Any]:
    x = x.T if orientation.transposed else x
    return x.conj() if orientation.conjugated else x


def _deal_out(execution: Execution, matrix: int, whole_matrix: NDArray[Any]) -> None:
    """Write a rank's block columns of an input."""
    plan = execution.plan
    given, shape = _oriented(whole_matrix, plan.problem.orientation("ab"[matrix])), plan.columns.matrices[matrix].shape
    if given.shape != shape:
        raise PlanError(f"{'ab'[matrix]} is {whole_matrix.shape}, which is not what was planned for")
    held, layout = execution.held(matrix), plan.input_layout("ab"[matrix])
    columns = _columns(layout, execution.rank)
    held[...] = given[:, columns]


def _columns(layout: Any, rank: int) -> NDArray[np.int64]:
    """Return the columns of a matrix that a rank holds, in the order in which it does."""
    width, first = layout.blocks[1], (rank - layout.source[1]) % layout.grid.npcol
    every: NDArray[np.int64] = np.arange(layout.shape[1])
    held: NDArray[np.int64] = every[every // width % layout.grid.npcol == first]
    return held


def _collect(plan: FactorPlan, ranks: Sequence[Execution], name: str) -> NDArray[Any]:
    output, layout = plan.output(name), plan.output_layout(name)
    if layout is None:
        held = [whole(ranks[rank], output) for rank in plan.holders]
        for other in held[1:]:
            np.testing.assert_array_equal(other, held[0], f"{name} differs between ranks")
        found: NDArray[Any] = held[0]
        return found
    found = np.empty(layout.shape, output.dtype)
    for rank in ranks:
        found[:, _columns(layout, rank.rank)] = block_columns(rank, name)
    return _oriented(found, output.orientation)
