r"""The task graph of a multiply: contribute tasks, one barrier, collect tasks.

::

    A(i,j) -> contribute \                       / collect (0,0) -> D(0,0)
    ...                   > barrier (one a run) <  ...
    B(i,j) -> contribute /                       \ collect (p,q) -> D(p,q)

The graph does not know the cluster: who multiplies what is decided when the barrier runs, on the scheduler.
No task waits for another one's task; only the barrier waits, for the run. Chunks that are in memory already are
contributed together, those of a worker by one task, since each task costs Dask most of a millisecond.

The same graph runs without a cluster too (``compute(scheduler="threads")``): then contribute tasks pass
their chunks on and the barrier multiplies alone.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from dask._task_spec import Alias, List, Task, TaskRef
from dask.highlevelgraph import HighLevelGraph
from distributed import Reschedule, get_worker
from numpy.typing import NDArray

from dask_distmm.answers import rebuild
from dask_distmm.chunks import order_of, stage
from dask_distmm.dtypes import typed
from dask_distmm.engines import get_engine
from dask_distmm.errors import EngineError
from dask_distmm.keys import barrier_key, output_name, stage_name
from dask_distmm.plan import Problem, Worker, plan
from dask_distmm.worker import WorkerSide, worker_side

__all__ = ["barrier", "build_graph", "build_output", "collect", "contribute", "together"]

# Chunks that one task contributes. What is on disk is read back on the worker's event loop, which others wait for.
_MOST_CHUNKS, _MOST_BYTES = 512, 2**30


class Step(Task):  # type: ignore[misc]
    """A task that Dask's optimizer must not fuse with others: its key is known to the plugins."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        """Keep this task and its key as they are."""
        return True

    def substitute(self, subs: Mapping[Any, Any], key: Any = None) -> Any:
        """Replace keys that this task needs, but never its own: a copy under another key is this task's result.

        ``dask.delayed`` makes such copies of whole graphs that are given to it. A copied barrier would ask for the
        run of another one.
        """
        if key is None and subs.get(self.key, self.key) != self.key:
            return Alias(self.key)
        return super().substitute(subs, key)


def together(problem: Problem, where: Mapping[str, NDArray[np.int32]]) -> dict[str, list[list[int]]]:
    """Return which chunks are contributed by one task, as far as it is several: chunks of one worker.

    Parameters
    ----------
    problem
        What is multiplied.
    where
        For operands all of whose chunks are in memory, a number for the worker that has each.

    Returns
    -------
    dict of list of list of int
        For some operands, all their chunks' numbers in groups.
    """
    found = {}
    for operand, holders in where.items():
        rows, cols = problem.chunks_of(operand)
        sizes = np.outer(rows, cols).ravel() * problem.itemsize(operand)
        groups: list[list[int]] = []
        for holder in np.unique(holders).tolist():
            group: list[int] = []
            room = 0
            for number in np.flatnonzero(holders == holder).tolist():
                room -= int(sizes[number])
                if not group or room < 0 or len(group) == _MOST_CHUNKS:
                    groups.append(group := [])
                    room = _MOST_BYTES - int(sizes[number])
                group.append(number)
        if len(groups) < len(holders):
            found[operand] = groups
    return found


def build_graph(
    problem: Problem, a: Any, b: Any, extras: Sequence[Any] = (), groups: Mapping[str, list[list[int]]] | None = None
) -> HighLevelGraph:
    """Return the graph of D under the array name ``problem.name``.

    Parameters
    ----------
    problem
        What is multiplied.
    a, b, extras
        Dask arrays of 2 dimensions; A's and B's transposes where the problem says so.
    groups
        Which chunks are contributed by one task, where it is several (`together`). Its key is that of the first one.
    """
    turned = dict(zip("ab", problem.turned, strict=True))
    operands = [("a", a), *([] if problem.same else [("b", b)]), *zip(problem.operands[2:], extras, strict=True)]
    numbers: list[bytes] = []
    receipts: list[List] = []
    layer: dict[Hashable, Task] = {}
    for operand, array in operands:
        name, turn = stage_name(problem.name, operand), turned.get(operand, False)
        nrows, ncols = array.numblocks[::-1] if turn else array.numblocks
        found = (groups or {}).get(operand) or [[number] for number in range(nrows * ncols)]
        keys = []
        for group in found:
            places = [divmod(number, ncols) for number in group]
            chunks = [TaskRef((array.name, j, i) if turn else (array.name, i, j)) for i, j in places]
            keys.append((name, *places[0]))
            layer[keys[-1]] = Step(keys[-1], contribute, problem.name, operand, places, turn, *chunks)
        numbers.append(np.array(list(itertools.chain(*found)), np.int32).tobytes())
        receipts.append(List(*map(TaskRef, keys)))
    gate = barrier_key(problem.name)
    layer[gate] = Step(gate, barrier, problem.to_wire(), numbers, *receipts)
    nrows, ncols = problem.chunk_counts("d")
    for index, (i, j) in enumerate(itertools.product(range(nrows), range(ncols))):
        key = (problem.name, i, j)
        layer[key] = Step(key, collect, problem.name, "", index, TaskRef(gate))
    return HighLevelGraph.from_collections(problem.name, layer, dependencies=[array for _, array in operands])


def build_output(problem: Problem, output: str, d: Any) -> HighLevelGraph:
    """Return the graph of an auxiliary output: the same run's, other chunks collected.

    Parameters
    ----------
    problem
        What is multiplied.
    output
        Name of the output.
    d
        The array of D.
    """
    name, gate = output_name(problem.name, output), barrier_key(problem.name)
    nrows, ncols = problem.chunk_counts("d")
    layer = {
        (name, i, j): Step((name, i, j), collect, problem.name, output, index, TaskRef(gate))
        for index, (i, j) in enumerate(itertools.product(range(nrows), range(ncols)))
    }
    return HighLevelGraph.from_collections(name, layer, dependencies=[d])


class Alone:
    """A chunk on its way to a barrier that runs without a cluster, or the chunks of its result."""

    def __init__(self, value: Any) -> None:
        self.value = value


def contribute(
    name: str, operand: str, places: Sequence[tuple[int, int]], turn: bool, *chunks: Any
) -> list[tuple[str, str]] | list[Alone]:
    """Stage chunks, or their transposes, where they lie; return for each the worker's address and the memory order."""
    side, chunks = _side(), tuple(chunk.T for chunk in chunks) if turn else chunks
    if side is None:
        return [Alone(chunk) for chunk in chunks]
    return side.stage(name, operand, dict(zip(places, chunks, strict=True)))


def barrier(wire: dict[str, Any], numbers: Sequence[bytes], *contributed: Sequence[Sequence[Any]]) -> int | Alone:
    """Have the multiply run; return the number of the run.

    Parameters
    ----------
    wire
        The problem.
    numbers
        For each operand that is staged, the numbers of its chunks as they come.
    contributed
        For each of these what each contribute task has returned.

    Raises
    ------
    DistMMError
        The run failed; one of the types of `dask_distmm.errors`.
    """
    side, receipts = _side(), list(map(_in_order, numbers, contributed))
    if side is None or isinstance(receipts[0][0], Alone):
        return _run_alone(Problem.from_wire(wire), receipts)
    addresses = sorted({address for operand in receipts for address, _ in operand})
    number = {address: index for index, address in enumerate(addresses)}
    where = [np.array([number[address] for address, _ in operand], np.int32).tobytes() for operand in receipts]
    orders = [collections.Counter(order for _, order in operand).most_common(1)[0][0] for operand in receipts]
    answer = _request_run(side, wire, {"addresses": addresses, "where": where, "orders": orders})
    if answer["status"] == "restart":
        # The scheduler has released this task, and what it needs again, already.
        raise Reschedule
    if answer["status"] == "failed":
        raise rebuild(answer)
    run_id: int = answer["run_id"]
    return run_id


def _in_order(numbers: bytes, contributed: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what tasks have returned for chunks, by the chunks' numbers."""
    by_number = dict(zip(np.frombuffer(numbers, np.int32).tolist(), itertools.chain(*contributed), strict=True))
    return [by_number[number] for number in range(len(by_number))]


def _request_run(side: WorkerSide, wire: dict[str, Any], staging: dict[str, Any]) -> dict[str, Any]:
    from dask_distmm.scheduler import DistMMSchedulerPlugin

    message = {"problem": wire, "worker": side.address, **staging}
    answer = None
    for attempt in range(2):
        if attempt or not side.scheduler_ready:
            side.install_on_scheduler(DistMMSchedulerPlugin())
        answer = side.call_scheduler("distmm_run", **message)
        if isinstance(answer, dict):
            return answer
        # The scheduler knows no such call: it was restarted and has lost the plugin.
    raise EngineError(f"the scheduler answered {answer!r} to distmm_run: is dask_distmm installed there?")


def _run_alone(problem: Problem, receipts: Sequence[Sequence[Any]]) -> Alone:
    """Multiply in this process, where there is no cluster."""
    staged = [[stage(receipt.value) for receipt in operand] for operand in receipts]
    names = [name for name in problem.operands if name != "b" or not problem.same]
    types = map(problem.dtype_of, names)
    operands = [[typed(x.array, dtype) for x in found] for dtype, found in zip(types, staged, strict=True)]
    if problem.same:
        operands.insert(1, operands[0])
    named = zip(problem.operands, operands, strict=True)
    chunks = {(op, i): chunk for op, found in named for i, chunk in enumerate(found)}
    where_a, where_b, *where_extras = (np.zeros(len(found), np.int32) for found in operands)
    orders = (order_of(operands[0][0]), order_of(operands[1][0]))
    made = plan(
        problem,
        [Worker("here")],
        where_a=where_a,
        where_b=where_b,
        engine=problem.engine_alone,
        orders=orders,
        where_extras=where_extras,
    )
    job = get_engine(made.engine).job(made, 0, chunks, _NoComm(), lambda share: None)
    job.prepare()
    job.accept([job.offer])
    return Alone(job.execute())


class _NoComm:
    received_bytes = 0

    def fetch(self, peer: int, kind: str, boxes: Any, flat: bool) -> Any:
        raise AssertionError("a worker alone has no peers")


def collect(name: str, output: str, index: int, run: int | Alone) -> Any:
    """Return one chunk of D (``output=""``) or of an auxiliary output."""
    if isinstance(run, Alone):
        return run.value[(output, index) if output else index]
    side = _side()
    if side is None:
        raise EngineError(f"chunk {index} of {name} is on the cluster; this task does not run there")
    found = side.collect(run, output, index)
    if found is None:
        # Not on the worker it was pinned to: somebody has overruled that, or its worker is gone.
        answer = side.call_scheduler("distmm_locate", name=name, run_id=run, index=index)
        found = side.fetch_output(answer["address"], run, output, index) if answer["status"] == "OK" else None
    if found is None:
        side.call_scheduler("distmm_lost", name=name, run_id=run)
        # Nothing was computed: give the scheduler time to release this task.
        time.sleep(0.05)
        raise Reschedule
    return found


def _side() -> WorkerSide | None:
    try:
        worker = get_worker()
    except ValueError:
        return None
    return worker_side(worker)
