"""Eigenvalues that GPUs of one host share: what each lets the others read, and reads of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from dask_distmm.engines.factor.kernels import Kernels
from dask_distmm.engines.gpu.reduction import DeviceReduction, Peers, exchange_bytes
from dask_distmm.engines.peer.factor_panels import COLUMNS, EXCHANGE, ROWS, ROWS_COMPLETE, flag_of, offered_by
from dask_distmm.engines.peer.memory import Exporter
from dask_distmm.engines.peer.offers import BLOCKS, FLAG_BYTES
from dask_distmm.engines.peer.remote import Remote
from dask_distmm.engines.tridiagonal.conquer import row_bounds
from dask_distmm.engines.tridiagonal.reduction import Tridiagonal
from dask_distmm.planning.factor.placement import FactorPlacement

# The first bytes of the memory by which ranks meet, which have to be zero.
_WORDS = 256


class PeerShares:
    """`dask_distmm.engines.factor.eigen.Shares` of one rank; all its memory is allocated when it is made."""

    def __init__(self, plan: FactorPlacement, rank: int, kernels: Kernels, exporter: Exporter, flags: Any) -> None:
        self._plan, self._rank, self._kernels, self._flags = plan, rank, kernels, flags
        shapes = [(rows, cols) for rows, cols, _ in offered_by(plan, rank).tolist()]
        self.exchange = exporter.empty(shapes[EXCHANGE], np.dtype(np.uint8), "F")
        self.exchange[:_WORDS] = 0
        self.rows = exporter.empty(shapes[ROWS], np.dtype(np.float64), "F")
        self._spare = cp.empty(shapes[ROWS], np.float64, order="F")
        names = [plan.participants[index].address for index in plan.ranks]
        limit = plan.problem.options.transfer_timeout
        self._reduction = DeviceReduction(plan.work.columns, rank, plan.problem.dtype, names, limit)
        self._check: Callable[[], None] = lambda: None
        self.remote: Remote | None = None

    @property
    def arrays(self) -> list[Any]:
        """The large arrays that it holds."""
        return [self.exchange, self.rows, self._spare, *self._reduction.arrays]

    def abort(self) -> None:
        """Let kernels that wait for other ranks end; any thread."""
        self._reduction.abort()

    def reduce(self, array: Any, check: Callable[[], None], progress: Callable[[float], None]) -> Tridiagonal:
        """Reduce the matrix."""
        self._check = check
        bytes_ = exchange_bytes(self._plan.problem.task.a_shape[0], self._plan.problem.dtype.itemsize)
        addresses = [
            int((self.exchange if rank == self._rank else self._view(rank, EXCHANGE, (bytes_, 1), np.uint8)).data.ptr)
            for rank in range(len(self._plan.ranks))
        ]
        return self._reduction.reduce(array, self._kernels, Peers(addresses, self._columns), check, progress)

    def _columns(self, rank: int, columns: slice) -> Any:
        """Return columns of another rank's block columns."""
        shape = self._plan.work.columns.rows, self._plan.work.columns.local_cols(rank)
        return self._view(rank, COLUMNS, shape, self._plan.problem.dtype)[:, columns]

    def _view(self, rank: int, number: int, shape: tuple[int, int], dtype: Any) -> Any:
        """Return what another rank offers."""
        assert self.remote is not None
        return self.remote.view(self._plan.ranks[rank], BLOCKS, number, shape, np.dtype(dtype))

    def memory(self) -> tuple[Any, Any]:
        """Return memory for rows of vectors."""
        return self.rows, self._spare

    def deal(self, columns: NDArray[np.int64], target: Any) -> None:
        """Read this rank's columns out of all ranks' rows."""
        order, ranks = self._plan.problem.task.a_shape[0], len(self._plan.ranks)
        bounds, mine = row_bounds(order, ranks), columns[self._plan.work.columns.held(1, self._rank)]
        flag = flag_of(self._plan, None) + ROWS_COMPLETE
        current = cp.cuda.get_current_stream()
        cp.cuda.runtime.memsetAsync(self._flags.data.ptr + flag * FLAG_BYTES, 1, FLAG_BYTES, current.ptr)
        for turn in range(ranks):
            # Not all ranks read of the same one.
            rank = (self._rank + turn) % ranks
            source = self.rows
            if turn:
                assert self.remote is not None
                self.remote.wait(self._plan.ranks[rank], flag, self._check)
                source = self._view(rank, ROWS, (bounds[rank + 1] - bounds[rank], order), np.float64)
            self._kernels.merging.take(source, mine, target[bounds[rank] : bounds[rank + 1]])
