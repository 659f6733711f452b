"""Completes D: its tasks go to memory, where participants have left their chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from distributed.metrics import time

from dask_distmm.runtime import direct
from dask_distmm.runtime.messages import Done
from dask_distmm.runtime.scheduler.barriers import Barrier
from dask_distmm.runtime.scheduler.freezing import FrozenPlan

if TYPE_CHECKING:
    from distributed import Scheduler

# So many tasks are put into memory before others get the event loop again.
_SLICE = 1000


async def complete(
    scheduler: Scheduler, run_id: int, barrier: Barrier, frozen: FrozenPlan, answers: Mapping[str, Done], began: float
) -> int:
    """Put the tasks of D into memory where their chunks are; return how many wanted ones are missing."""
    stimulus = f"distmm-done-{run_id}"
    outputs = {key[0]: output for key, (output, _) in frozen.wanted.items()}
    completion = direct.Completion(scheduler, stimulus)
    left = set(frozen.wanted)
    ended, count = time(), 0
    for address, answer in answers.items():
        ws, unknown = frozen.states[address], []
        total = sum(len(numbers) // 8 for _, numbers, _ in answer.placed)
        started, share = began, (ended - began) / max(1, total)
        for name, raw_numbers, raw_sizes in answer.placed:
            ncols = barrier.problem.columns(outputs[name])
            numbers, sizes = np.frombuffer(raw_numbers, np.int64), np.frombuffer(raw_sizes, np.int64)
            for number, nbytes in zip(numbers.tolist(), sizes.tolist(), strict=True):
                key = (name, *divmod(number, ncols))
                ts = scheduler.tasks.get(key)
                # Dask's dashboard gets an equal share of the run for each of a worker's chunks.
                span = {"action": "compute", "start": started, "stop": started + share}
                started += share
                if ts is not None and completion.add(barrier.ts, ts, ws, nbytes, answer.type, span):
                    left.discard(key)
                elif ts is None or ws not in (ts.who_has or ()):
                    unknown.append(key)
                count += 1
                if count % _SLICE == 0:
                    completion.finish()
                    await asyncio.sleep(0)
        direct.free(scheduler, address, unknown, stimulus)
    completion.finish()
    # A chunk that no task wants any more is not missing.
    tasks = (scheduler.tasks.get(key) for key in left)
    return sum(ts is not None and ts.state == "waiting" for ts in tasks)
