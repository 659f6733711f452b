"""What the scheduler's plugin does to the tasks of a multiply: pins collect tasks to their workers, starts it again."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from distributed.core import error_message

from dask_distmm.keys import barrier_key, is_output, is_tile, parse_stage_key
from dask_distmm.results import Result
from dask_distmm.run import Run

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

__all__ = ["Pins"]


class Pins:
    """Collect tasks and the workers that they are restricted to, for each multiply by name.

    Parameters
    ----------
    scheduler
        The Dask scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pinned: dict[str, dict[Any, str]] = {}

    def __len__(self) -> int:
        """Return how many multiplies have pinned tasks."""
        return len(self._pinned)

    def pin(self, name: str, gate: TaskState, result: Result) -> None:
        """Restrict collect tasks to the workers that hold their chunks."""
        ncols = result.shape[1]
        ours = self._pinned.setdefault(name, {})
        for ts in gate.dependents:
            if not (isinstance(ts.key, tuple) and len(ts.key) == 3 and is_output(name, ts.key[0])):
                continue
            if ts.worker_restrictions and ts.key not in ours:
                continue  # the user's own
            address = result.holders[ts.key[1] * ncols + ts.key[2]]
            self._scheduler.set_restrictions({ts.key: {address}})
            ours[ts.key] = address

    def owed_by(self, name: str, address: str) -> bool:
        """Whether a worker holds chunks of a result that nobody has collected yet."""
        gate = self._scheduler.tasks.get(barrier_key(name))
        ours = self._pinned.get(name, {})
        return gate is not None and any(
            ts.state not in ("memory", "forgotten", "erred") and ours.get(ts.key) == address for ts in gate.dependents
        )

    def restart(
        self, name: str, stimulus_id: str, staged: Collection[tuple[str, tuple[int, int]]] | None = None
    ) -> None:
        """Release a multiply's barrier and contribute tasks; Dask computes them again if they are wanted.

        Parameters
        ----------
        name, stimulus_id
            The multiply, and what Dask's log is to say.
        staged
            Operands and places of the only chunks whose contribute tasks are released; None for all.
        """
        gate = self._scheduler.tasks.get(barrier_key(name))
        if gate is None:
            return
        present = {key: None for key in self._pinned.pop(name, {}) if key in self._scheduler.tasks}
        self._scheduler.set_restrictions(present)
        stages = [(ts, parse_stage_key(ts.key)) for ts in gate.dependencies if ts.state == "memory"]
        ours = {ts: stage[1:] for ts, stage in stages if stage and stage[0] == name}
        again = [ts for ts, place in ours.items() if staged is None or place in staged]
        recommendations = {ts.key: "released" for ts in again}
        if gate.state in ("memory", "processing"):
            recommendations[gate.key] = "released"
        self._scheduler.transitions(recommendations, stimulus_id=stimulus_id)
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)

    def fail(self, run: Run, error: Exception) -> None:
        """End a barrier's task here, as its worker would if it did not stand still: the user waits for it."""
        ts = self._scheduler.tasks.get(run.key)
        if ts is None or ts.state != "processing" or ts.processing_on.address != run.worker:
            return
        message = {name: value for name, value in error_message(error).items() if name != "status"}
        stimulus = f"distmm-failed-{run.run_id}"
        self._scheduler.handle_task_erred(run.key, stimulus, worker=run.worker, run_id=ts.run_id, **message)

    def unpin_tiles(self, address: str) -> None:
        """Let chunks that were laid out on a worker which is gone be made again anywhere."""
        lost = [ts for ts in self._scheduler.tasks.values() if ts.worker_restrictions == {address} and is_tile(ts.key)]
        self._scheduler.set_restrictions({ts.key: None for ts in lost})
        waiting = {ts.key: "processing" for ts in lost if ts.state == "no-worker"}
        self._scheduler.transitions(waiting, stimulus_id=f"distmm-unpin-{address}")

    def forget(self, name: str) -> None:
        """Forget a multiply whose tasks are gone."""
        self._pinned.pop(name, None)

    def clear(self) -> None:
        """Forget all."""
        self._pinned.clear()
