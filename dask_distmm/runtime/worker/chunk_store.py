"""The chunks that runs read from a worker's data, and those of D that they leave there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_distmm.engines.base import ChunkKey, Job, ResultKey
from dask_distmm.errors import EngineError, ProtocolError
from dask_distmm.planning import Placement
from dask_distmm.runtime import direct
from dask_distmm.runtime.chunks import numbered

if TYPE_CHECKING:
    from distributed import Worker

# So many chunks are given to Dask before others get the event loop again.
_SLICE = 500


class ChunkStore:
    """Reads chunks of operands from Dask's data on one worker, and puts chunks of D there.

    Dask's scheduler hears of chunks of D when all participants of their run are done. Until then `take_back` can
    remove them.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # By run the keys of values that Dask's scheduler has not heard of yet.
        self._placed: dict[int, list[Any]] = {}
        # By run the keys of chunks in whose memory it makes D.
        self._claimed: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        """Return how many runs have left chunks that Dask's scheduler has not heard of yet."""
        return len(self._placed)

    def read(
        self, plan: Placement, me: int, keys: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[ChunkKey, Any], list[Any]]:
        """Return the chunks that a participant has, and the keys of those that are not here. Any thread.

        Dask reads back chunks that it has spilled to disk, which may take long.
        """
        problem, data = plan.problem, self._worker.data
        chunks: dict[ChunkKey, Any] = {}
        missing = []
        for operand, where in plan.where.items():
            numbers = np.flatnonzero(where == me).tolist()
            names = keys.get(problem.source_of(operand), ())
            if len(names) != len(numbers):
                raise ProtocolError(f"{len(names)} keys for {len(numbers)} chunks of {operand.upper()}")
            turned = problem.is_turned(operand)
            for number, key in zip(numbers, names, strict=True):
                try:
                    chunk = data[key]
                except KeyError:
                    missing.append(key)
                else:
                    chunks[operand, number] = chunk.T if turned else chunk
        return chunks, missing

    def claim(self, run_id: int, plan: Placement, me: int, keys: Mapping[str, Sequence[Any]], job: Job[Any]) -> None:
        """Note the chunks in whose memory a job makes D; parameters as for `read`. Any thread."""
        if not job.consumed:
            return
        claimed: list[Any] = []
        for operand in {name for name, _ in job.consumed}:
            named = zip(np.flatnonzero(plan.where[operand] == me).tolist(), keys[operand], strict=True)
            claimed += [key for number, key in named if (operand, number) in job.consumed]
        self._claimed[run_id] = claimed

    def consume(self, run_id: int) -> None:
        """Take the claimed chunks out of Dask's data, so that nobody reads them half way. On the event loop.

        The scheduler drops its knowledge of them when the run is over, whether it has succeeded or not.
        """
        for key in self._claimed.pop(run_id, ()):
            if key in self._worker.data:
                del self._worker.data[key]

    async def place(
        self,
        run_id: int,
        plan: Placement,
        result: Mapping[ResultKey, Any],
        deliver: Sequence[tuple[str, str, bytes]],
        live: Callable[[], bool],
    ) -> list[tuple[str, bytes, bytes]]:
        """Give a run's chunks of D to Dask. On the worker's event loop, which others get in between."""
        made: dict[str, dict[int, Any]] = {}
        for (output, number), value in numbered(plan, result).items():
            made.setdefault(output, {})[number] = value
        placed = []
        for output, array, raw in deliver:
            skipped = set(np.frombuffer(raw, np.int64).tolist())
            values = {number: value for number, value in made.get(output, {}).items() if number not in skipped}
            sizes: list[int] = []
            ncols, every = plan.problem.columns(output), list(values)
            for some in (every[at : at + _SLICE] for at in range(0, len(every), _SLICE)):
                if not live():
                    raise EngineError(f"run {run_id} was ended")
                keys = [(array, *divmod(number, ncols)) for number in some]
                self._placed.setdefault(run_id, []).extend(keys)
                found = dict(zip(keys, (values[number] for number in some), strict=True))
                sizes.extend(direct.keep(self._worker, found, f"distmm-run-{run_id}").values())
                if len(values) > _SLICE:
                    await asyncio.sleep(0)
            if values:
                placed.append((array, np.array(every, np.int64).tobytes(), np.array(sizes, np.int64).tobytes()))
        return placed

    def hand_over(self, run_id: int) -> None:
        """Leave the chunks of a run that is done to Dask alone."""
        self._placed.pop(run_id, None)
        self._claimed.pop(run_id, None)

    def take_back(self, run_id: int) -> None:
        """Remove the chunks of a run that has failed, but for those that a later run has made again."""
        self._claimed.pop(run_id, None)
        if keys := self._placed.pop(run_id, ()):
            later = set(itertools.chain(*(found for number, found in self._placed.items() if number > run_id)))
            direct.let_go(self._worker, [key for key in keys if key not in later], run_id)
