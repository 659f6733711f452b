"""The chunks that runs read from a worker's data, and those of D that they leave there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_distmm.engines.base import ChunkKey
from dask_distmm.errors import EngineError, ProtocolError
from dask_distmm.planning import Plan
from dask_distmm.runtime import direct
from dask_distmm.runtime.chunks import numbered
from dask_distmm.runtime.keys import output_name

if TYPE_CHECKING:
    from distributed import Worker

__all__ = ["ChunkStore"]

# So many chunks are given to Dask before others get the event loop again.
_SLICE = 500


class ChunkStore:
    """Reads chunks of operands from Dask's data on one worker, and puts chunks of D there.

    Dask's scheduler hears of chunks of D when all participants of their run are done. Until then `take_back` can
    remove them.

    Parameters
    ----------
    worker
        The Dask worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # By run the keys of values that Dask's scheduler has not heard of yet.
        self._placed: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        """Return how many runs have left chunks that Dask's scheduler has not heard of yet."""
        return len(self._placed)

    def read(self, plan: Plan, me: int, keys: Mapping[str, Sequence[Any]]) -> tuple[dict[ChunkKey, Any], list[Any]]:
        """Return the chunks that a participant has, and the keys of those that are not here. Any thread.

        Dask reads back chunks that it has spilled to disk, which may take long.

        Parameters
        ----------
        plan, me
            The plan of the run, and which participant of it this worker is.
        keys
            For each operand of which this worker has chunks their keys, in the order of the chunks' numbers.

        Raises
        ------
        ProtocolError
            The keys do not fit the plan.
        """
        problem, data = plan.problem, self._worker.data
        chunks: dict[ChunkKey, Any] = {}
        missing = []
        for operand, where in plan.where.items():
            assert where is not None
            numbers = np.flatnonzero(where == me).tolist()
            names = keys.get("a" if operand == "b" and problem.same else operand, ())
            if len(names) != len(numbers):
                raise ProtocolError(f"{len(names)} keys for {len(numbers)} chunks of {operand.upper()}")
            turned = operand in "ab" and problem.turned["ab".index(operand)]
            for number, key in zip(numbers, names, strict=True):
                try:
                    chunk = data[key]
                except KeyError:
                    missing.append(key)
                else:
                    chunks[operand, number] = chunk.T if turned else chunk
        return chunks, missing

    async def place(
        self,
        run_id: int,
        plan: Plan,
        result: Mapping[Any, Any],
        unwanted: Sequence[tuple[str, bytes]],
        live: Callable[[], bool],
    ) -> list[tuple[str, bytes, bytes]]:
        """Give a run's chunks of D to Dask. On the worker's event loop, which others get in between.

        Parameters
        ----------
        run_id, plan
            Number and plan of the run.
        result
            The chunks, as the run's job has returned them.
        unwanted
            Names of outputs, and the numbers of those of their chunks that no task waits for, as int64.
        live
            Whether the run is still live.

        Returns
        -------
        list of tuple
            For each output its name, the numbers of its chunks and their bytes, both as int64.

        Raises
        ------
        EngineError
            The run was ended meanwhile.
        """
        name, problem = plan.problem.result_name, plan.problem
        ncols = problem.part.ncols if problem.part is not None else problem.chunk_counts("d")[1]
        skipped = {output: set(np.frombuffer(raw, np.int64).tolist()) for output, raw in unwanted}
        todo: dict[str, dict[int, Any]] = {}
        for key, value in numbered(plan, result).items():
            output, number = key if isinstance(key, tuple) else ("", key)
            if number not in skipped.get(output, ()):
                todo.setdefault(output, {})[number] = value
        placed = []
        for output, values in todo.items():
            sizes: list[int] = []
            array = output_name(name, output)
            every = list(values)
            for some in (every[at : at + _SLICE] for at in range(0, len(every), _SLICE)):
                if not live():
                    raise EngineError(f"run {run_id} was ended")
                keys = [(array, *divmod(number, ncols)) for number in some]
                self._placed.setdefault(run_id, []).extend(keys)
                found = dict(zip(keys, (values[number] for number in some), strict=True))
                sizes.extend(direct.keep(self._worker, found, f"distmm-run-{run_id}").values())
                if len(values) > _SLICE:
                    await asyncio.sleep(0)
            placed.append((output, np.array(every, np.int64).tobytes(), np.array(sizes, np.int64).tobytes()))
        return placed

    def hand_over(self, run_id: int) -> None:
        """Leave the chunks of a run that is done to Dask alone."""
        self._placed.pop(run_id, None)

    def take_back(self, run_id: int) -> None:
        """Remove the chunks of a run that has failed, but for those that a later run has made again."""
        if keys := self._placed.pop(run_id, ()):
            later = set(itertools.chain(*(found for number, found in self._placed.items() if number > run_id)))
            direct.let_go(self._worker, [key for key in keys if key not in later], run_id)
