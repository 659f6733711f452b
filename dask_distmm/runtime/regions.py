"""Regions: parts of new graphs that become one run each, under `enable`. On the scheduler's event loop.

A graph comes to the scheduler when it has been optimized, with each of its tasks. Here it is known which chunks are in
memory, or will be, and on which workers; how long tasks of a name take; and who asks for what. Tasks that depend on
nothing but such chunks, small constants and each other are a region; so are those behind the chunks of a run, which
are the next one. Dask keeps what reads files, draws random numbers or is made by Delayed, and all that depends on it;
tasks with annotations; and regions without a product that are not next to a run. A region's barrier has the tasks, and
the chunks that others need of it have their own keys: culled, kept, released and made again as those of every run.

Whenever the run of a region can't be, Dask gets its tasks back.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, List, Task, TaskRef, _execute_subgraph
from dask.base import tokenize
from dask.sizeof import sizeof
from dask.utils import funcname, key_split

from dask_distmm.config import dask_costs, read_options
from dask_distmm.engines.base import log
from dask_distmm.engines.sources import ChunkTasks
from dask_distmm.errors import EngineError
from dask_distmm.numeric.sparse import total
from dask_distmm.planning import Problem, problem_from_wire
from dask_distmm.planning.computation import NamedMatrix
from dask_distmm.planning.cuts import chunk_cuts, overlaps
from dask_distmm.planning.placement import CLEARLY
from dask_distmm.planning.region import INPUTS, TASKS, Region, RegionProblem, assign, expected_seconds, operand
from dask_distmm.runtime import direct
from dask_distmm.runtime.chunks import multiply_parts
from dask_distmm.runtime.keys import ChunkTask, barrier_key, barrier_task, is_barrier, needed, operand_keys, wave_of
from dask_distmm.runtime.messages import Done

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

# Larger graphs are not looked at, and larger constants not sent to several ranks (bytes).
_MOST_TASKS, _SMALL = 5_000, 2**18
# Tasks that multiply, by the names of the functions that Dask calls for each chunk.
_PRODUCTS = frozenset(["_matmul", "_tensordot", "chunk_einsum"])
# Functions that make chunks which follow from a few numbers.
_MADE = frozenset(["eye", "ones_like", "zeros_like", "full_like", "arange", "linspace"])
# Names of tasks whose values are much smaller than what they read, by parts of them; and by how much, at a guess.
_REDUCING = ("sum", "mean", "prod", "max", "min", "var", "std", "norm", "any", "all", "reduce", "moment", "aggregate")
_REDUCED = 64
# Why a task is in no region that needs no work.
_THERE = "being made, or in memory"
# Products of more work on CPUs and on GPUs, of more bytes that a rank gets, or of more pieces are runs of their own: in
# these GPUs read each other's memory, while what tasks get from other ranks goes by the hosts.
_FLOPS, _MOVED, _PIECES = {"numpy": 2e10, "cupy": 2e12}, {"numpy": 2**26, "cupy": 2**22}, 256
# Bytes up to which chunks along k are concatenated for one product.
_TOGETHER = 2**23
# Dask moves a task to another worker if it would start this much earlier there (seconds).
_STEALS = 0.1
# How fast a thread, or a GPU, is expected to read what a task reads, where it is not known how long tasks of a name
# take (bytes a second).
_READS = {"numpy": 5e9, "cupy": 1e12}


def fused(task: Task) -> Collection[GraphNode]:
    """Return the tasks that Dask has fused to one; none if it is one by itself."""
    inner = task.args[0] if task.func is _execute_subgraph else None
    return (getattr(inner, "value", inner) or {}).values()


def is_product(task: GraphNode) -> bool:
    """Whether a task multiplies matrices, or one that is fused with it does."""
    if not isinstance(task, Task):
        return False
    if inner := fused(task):
        return any(map(is_product, inner))
    return task.func is multiply_parts or funcname(task.func) in _PRODUCTS


def root_bytes(task: GraphNode) -> int | None:
    """Estimate the bytes of a task's result if it only reads small constants; None if it may read more."""
    if isinstance(task, DataNode):
        return int(sizeof(task.value))
    if not isinstance(task, Task):
        return None
    if inner := fused(task):
        sizes = [root_bytes(task) for task in inner if not task.dependencies]
        return None if None in sizes else sum(filter(None, sizes))
    if funcname(task.func) not in _MADE:
        return None
    numbers = [x for arg in task.args for x in (arg if isinstance(arg, tuple | list) else [getattr(arg, "value", arg)])]
    return 8 * math.prod(max(1, abs(int(x))) for x in numbers if isinstance(x, int | np.integer))


def is_chunk_key(key: Any) -> bool:
    """Whether a key is of a chunk of an array: a name, and its place."""
    return (
        isinstance(key, tuple)
        and isinstance(key[0], str)
        and all(isinstance(place, int | np.integer) for place in key[1:])
    )


def may_move(key: Any, task: GraphNode) -> bool:
    """Whether a run may call a task: it makes a chunk of others, or of constants, and is not special to Dask."""
    if type(task) not in (Task, Alias) or not is_chunk_key(key) or task.block_fusion:
        return False
    return bool(task.dependencies) or ((size := root_bytes(task)) is not None and size <= _SMALL)


class Parts(NamedTuple):
    """The parts of a graph that may be regions."""

    # The keys of each, in order: before any run, behind one, behind two one after the other, and so on. What waits for
    # something that is still being made is apart from what waits for nothing, or for something else.
    regions: list[list[Any]]
    constants: dict[Any, GraphNode]
    # Products that are parts of them: their barriers.
    products: dict[Any, Problem]
    # Why tasks are in none of them.
    left: dict[Any, str]


def parts_of(
    graph: Mapping[Any, GraphNode],
    submitted: Collection[Any],
    order: Mapping[Any, int],
    own: Collection[Any],
    nranks: int,
    pending: Callable[[Any], bool],
) -> Parts:
    """Return the parts of a graph that may be regions. Pure.

    `submitted` are keys that the scheduler has already; `own` are barriers of products that are runs of their own;
    `pending` says whether a known chunk is still being made.
    """
    levels: dict[Any, int] = {}
    mine: dict[Any, int] = {}
    constants: dict[Any, GraphNode] = {}
    products: dict[Any, Problem] = {}
    # Disjoint sets (union-find): above each task another one of its set, or itself.
    above: dict[Any, Any] = {}
    worthy: set[Any] = set()
    left: dict[Any, str] = {}
    begun = {task.barrier for key in submitted if isinstance(task := graph.get(key), ChunkTask)}.union(own, submitted)

    def group_of(member: Any) -> Any:
        while (up := above.setdefault(member, member)) != member:
            above[member] = member = above[up]
        return member

    def is_there(dep: Any) -> bool:
        """Whether a region may read a value: one of its own, or one that waits for nothing of Dask's."""
        own = dep in mine or dep in constants
        return own or dep not in graph or dep in submitted or isinstance(graph[dep], ChunkTask)

    for key in in_order(graph, order):
        task = graph[key]
        needs = task.dependencies
        level = levels[key] = max((levels.get(dep, 0) for dep in needs), default=0)
        if isinstance(task, ChunkTask):
            if task.barrier not in products or key in submitted:
                levels[key] = level + 1
                continue
        elif is_barrier(task):
            if key not in begun and all(map(is_there, needs)) and (product := product_of(task, nranks)):
                products[key] = product
            else:
                worthy.update(dep for dep in needs if dep in mine)
                left[key] = "runs of their own"
                continue
        elif key in submitted:
            left[key] = _THERE
            continue
        elif isinstance(task, DataNode):
            if sizeof(task.value) <= _SMALL:
                constants[key] = task
            else:
                left[key] = "data of the client"
            continue
        elif not may_move(key, task):
            left[key] = "reading, drawing or making something, or not chunks of arrays"
            continue
        elif not all(map(is_there, needs)):
            left[key] = "depending on what Dask makes"
            continue
        mine[key] = level
        # A product with nothing beside it would be a run as well, and a slower one: of a task for each piece, in place
        # of the engine's program.
        beside = any(dep in mine if key in products else isinstance(graph.get(dep), ChunkTask) for dep in needs)
        if beside or is_product(task):
            worthy.add(key)
        for dep in needs:
            if mine.get(dep) == level:
                above[group_of(key)] = group_of(dep)
    worth = {group_of(key) for key in worthy}
    waited: dict[Any, set[Any]] = {group: set() for group in worth}
    for key in mine:
        if (group := group_of(key)) not in worth:
            left[key] = "runs of their own" if key in products else "without a product, and not next to a run"
            continue
        for dep in graph[key].dependencies:
            if dep not in mine and (isinstance(source := graph.get(dep), ChunkTask) or pending(dep)):
                waited[group].add(source.barrier if isinstance(source, ChunkTask) else dep[0] if dep else dep)
    regions: dict[Any, list[Any]] = {}
    for key, level in mine.items():
        if (group := group_of(key)) in worth:
            regions.setdefault((level, frozenset(waited[group])), []).append(key)
    return Parts([regions[place] for place in sorted(regions, key=itemgetter(0))], constants, products, left)


def product_of(barrier: GraphNode, nranks: int) -> Problem | None:
    """Return a barrier's product if it may run as tasks of a region: a plain one, of little work and traffic."""
    wire = barrier.args[0]
    if not isinstance(wire, Mapping) or wire.get("kind") != Problem.kind:
        return None
    problem = problem_from_wire(wire)
    assert isinstance(problem, Problem)
    a, b, d = problem.a, problem.b, problem.d
    demands = problem.workers, problem.compute, problem.by_ranks, problem.extras, problem.laid_out, problem.stationary
    plain = problem.method == problem.engine == "auto" and not any(demands) and wave_of(problem.name) is None
    plain = plain and problem.formula.plain and d.chunks == (a.chunks[0], b.chunks[1])
    types = {a.dtype, b.dtype, d.dtype, problem.compute_type.name}
    pieces = a.counts[0] * b.counts[1] * (a.counts[1] + b.counts[0])
    # Each of several ranks gets about half of the smallest matrix, or more. To add that up by pieces takes longer.
    moved = min(matrix.bytes.sum() for matrix in (a, b, d)) / 2 if nranks > 1 else 0
    fits = problem.flops <= _FLOPS.get(problem.array, 0) and moved <= _MOVED.get(problem.array, 0) and pieces <= _PIECES
    return problem if plain and fits and len(types) == 1 and problem.result_type.kind in "fc" else None


def tasks_of_product(
    problem: Problem, barrier: GraphNode, chunk: ChunkTask, place: Callable[[Any], Any]
) -> dict[Any, GraphNode]:
    """Return the tasks that compute a chunk of a product: one for each piece along k, each adding to the last sum."""
    _, lists = operand_keys(barrier)
    keys = dict(zip(problem.inputs, lists, strict=True))
    a_cols, b_cols = problem.a.counts[1], problem.b.counts[1]
    i, j = divmod(chunk.index, b_cols)
    # Keys of the chunks of a row of A, and of a column of B; their bytes, and where they are along k.
    rows = [
        [keys[problem.source_of("a")][i * a_cols + p] for p in range(a_cols)],
        [keys[problem.source_of("b")][q * b_cols + j] for q in range(problem.b.counts[0])],
    ]
    nbytes = [problem.a.bytes[i * a_cols : (i + 1) * a_cols], problem.b.bytes[j::b_cols]]
    edges = chunk_cuts(problem.a.chunks[1]), chunk_cuts(problem.b.chunks[0])
    # Pieces of k: of a chunk of A and one of B; or of one chunk, if what it is multiplied by is little, and so is put
    # together fast.
    little = min((0, 1), key=lambda side: nbytes[side].sum())
    cuts = edges[1 - little] if nbytes[little].sum() <= _TOGETHER else sorted({*edges[0], *edges[1]})
    pieces = [(low, high) for low, high in itertools.pairwise(cuts) if low < high]
    products, sums = dict[Any, GraphNode](), dict[Any, list[Any]]()
    name = f"product-{tokenize(barrier.key)}"
    for number, piece in enumerate(pieces):
        refs, views, firsts = [], [], []
        for side, matrix in enumerate((problem.a, problem.b)):
            used = overlaps(edges[side], *piece)
            slices = [slice(start - edges[side][x], stop - edges[side][x]) for x, start, stop in used]
            refs.append(List(*(TaskRef(rows[side][x]) for x, _, _ in used)))
            views.append((matrix.axes, matrix.transposed, matrix.conjugated, slices))
            firsts.append((nbytes[side][used[0][0]], -side, rows[side][used[0][0]]))
        key = (name, i, j, number) if len(pieces) > 1 else chunk.key
        products[key] = Task(key, multiply_parts, *refs, *views, len(problem.d.axes))
        # They are added up where the larger one of the first chunks is.
        sums.setdefault(place(max(firsts)[2]), []).append(key)
    if len(pieces) == 1:
        return products
    parts = list[Any]()
    for number, some in enumerate(sums.values()):
        if len(sums) > 1 and len(some) > 1:
            key = (f"{name}-sum", i, j, number)
            products[key] = Task(key, total, List(*map(TaskRef, some)))
            parts.append(key)
        else:
            parts += some
    products[chunk.key] = Task(chunk.key, total, List(*map(TaskRef, parts)))
    return products


def in_order(graph: Mapping[Any, GraphNode], order: Mapping[Any, int]) -> list[Any]:
    """Sort the keys of a graph topologically, otherwise by an order."""
    ordered: dict[Any, None] = {}
    for first in sorted(graph, key=lambda key: order.get(key, -1)):
        todo = [first]
        while todo:
            left = [dep for dep in graph[todo[-1]].dependencies if dep in graph and dep not in ordered]
            todo += left
            if not left:
                ordered[todo.pop()] = None
    return list(ordered)


def expected_size(name: str, product: bool, sizes: Sequence[int]) -> int:
    """Estimate the bytes of a task's result from those of its inputs."""
    if not sizes:
        return 0
    if product:
        return int(math.prod(float(max(1, size)) ** (1 / len(sizes)) for size in sizes))
    most = max(sizes)
    return most // _REDUCED if any(word in name for word in _REDUCING) else most


class Draft:
    """A region with its inputs and results, before the graph is changed."""

    def __init__(
        self,
        graph: Mapping[Any, GraphNode],
        keys: Collection[Any],
        part: Sequence[Any],
        parts: Parts,
        place: Callable[[Any], Any],
        shared: Callable[[Any], bool],
    ) -> None:
        own = {key: graph[key] for key in part}
        self.inside, self.constants = own.keys(), parts.constants
        wanted = set(keys) & self.inside
        for key, task in graph.items():
            if key not in self.inside:
                wanted |= self.inside & task.dependencies
        # What known tasks depend on, and others need of it, stays with Dask, with all that it depends on: a run may
        # have inputs that were made of it, and couldn't be made again if all of a run were needed for that.
        self.dasks = needed(own, list(filter(shared, wanted))).keys()
        wanted -= self.dasks
        useful = needed(own, wanted).keys() if self.dasks else self.inside
        self.products = useful & parts.products.keys()
        # The tasks, in order: of products those of their chunks.
        self.tasks: dict[Any, GraphNode] = {}
        for key in part:
            if key not in useful:
                continue
            task = graph[key]
            if isinstance(task, ChunkTask):
                barrier = task.barrier
                self.tasks |= tasks_of_product(parts.products[barrier], graph[barrier], task, place)
            elif key not in self.products:
                self.tasks[key] = task
        # Chunks that are there before, in the order in which they are needed; those that others need, by their arrays.
        read = dict.fromkeys(dep for task in self.tasks.values() for dep in task.dependencies)
        self.counts = dict(collections.Counter(map(key_split, self.tasks)))
        # What the tasks take, and what comes to it with a run and with Dask's own tasks; the run, if that is faster.
        self.seconds = 0.0, 0.0, 0.0
        self.problem: RegionProblem | None = None
        self.inputs = [key for key in read if key not in self.tasks and key not in self.constants]
        self.results: dict[str, list[Any]] = {}
        for key in part:
            if key in wanted:
                self.results.setdefault(key[0], []).append(key)


class Regions:
    """Makes regions of new graphs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # Clients under `enable`.
        self.clients: set[str] = set()
        # By names how long tasks have taken in runs.
        self._seconds: dict[str, float] = {}

    def look(
        self, graph: dict[Any, GraphNode], keys: Collection[Any], order: dict[Any, int], details: Mapping[str, Any]
    ) -> list[TaskState]:
        """Replace regions by runs if these are faster; return the tasks that lost a dependent."""
        demands = [details.get(name) for name in ("annotations_by_type", "actors", "user_priority")]
        annotated = set(details.get("global_annotations") or ()) - {"span"}
        if details.get("client") not in self.clients or any(demands) or annotated or len(graph) > _MOST_TASKS:
            return []
        if not any(is_barrier(task) or is_product(task) for task in graph.values()):
            return []
        lost: list[TaskState] = []
        try:
            for draft in self._found(graph, keys, order)[0]:
                lost += self._replace(graph, keys, order, draft)
        except Exception:  # whatever a user's graph holds: it is Dask's then
            log.warning("a graph was not looked through", exc_info=True)
        return lost

    def explain(self, graph: Mapping[Any, GraphNode], keys: Collection[Any]) -> tuple[list[Region], dict[str, int]]:
        """Return the regions of a graph, and the counts of its other tasks by the reason why they are in none."""
        drafts, parts = self._found(graph, keys, {})
        regions = list[Region]()
        for draft in drafts:
            outputs, names = sum(map(len, draft.results.values())), [parts.products[key].name for key in draft.products]
            about = draft.counts, len(draft.inputs), outputs, names, draft.seconds
            regions.append(Region(*about, draft.problem is not None))
        return regions, dict(collections.Counter(parts.left.values()))

    def _found(
        self, graph: Mapping[Any, GraphNode], keys: Collection[Any], order: Mapping[Any, int]
    ) -> tuple[list[Draft], Parts]:
        """Return the candidate regions of a graph; with problems if a run is faster."""
        # A released task that the scheduler keeps for recomputation may be recomputed within a region.
        tasks, graph = self._scheduler.tasks, dict(graph)
        for key in (todo := list(graph)):
            for dep in graph[key].dependencies:
                ts = None if dep in graph else tasks.get(dep)
                if ts is not None and ts.state == "released" and type(ts.run_spec) in (Task, Alias, DataNode):
                    graph[dep] = ts.run_spec
                    todo.append(dep)
        submitted = {key for key in graph if (ts := tasks.get(key)) is not None and ts.state != "released"}

        def pending(key: Any) -> bool:
            return (ts := tasks.get(key)) is not None and not ts.who_has

        def shared(key: Any) -> bool:
            return (ts := tasks.get(key)) is not None and bool(ts.dependents)

        own, nranks = set[Any](), len(self._workers())
        while True:
            parts = parts_of(graph, submitted, order, own, nranks, pending)
            drafts = [Draft(graph, keys, part, parts, self._place, shared) for part in parts.regions if nranks]
            # A graph with nothing beside a region takes no start of Dask's own tasks; else both have their way from the
            # client and back in any case, half of what is around a run.
            whole = len(drafts) == 1 and set(parts.left.values()) <= {_THERE}
            for draft in drafts:
                draft.problem = self._problem(draft, whole)
            left = [key for draft in drafts if draft.problem is None for key in draft.products]
            if not left:
                return drafts, parts
            own.update(left)

    def _replace(
        self, graph: dict[Any, GraphNode], keys: Collection[Any], order: dict[Any, int], draft: Draft
    ) -> list[TaskState]:
        """Replace a region by its run, if it has one; see `look`."""
        if (problem := draft.problem) is None:
            return []
        barrier, constants = barrier_key(problem.name), draft.constants
        packed = []
        for task in draft.tasks.values():
            needs = [dep for dep in task.dependencies if dep not in constants]
            packed.append((task, needs, {dep: constants[dep].value for dep in task.dependencies if dep in constants}))
        graph[barrier] = barrier_task(problem, _not_here, {INPUTS: draft.inputs, TASKS: ChunkTasks(packed)})
        order[barrier] = min(order.get(key, 0) for key in draft.inside)
        for key in draft.inside - draft.dasks:
            graph.pop(key, None)
        lost: list[TaskState] = []
        for name, chunks in draft.results.items():
            for number, key in enumerate(chunks):
                if (ts := self._scheduler.tasks.get(key)) is not None and ts.run_spec is not None:
                    lost += direct.forget_run_spec(ts)
                graph[key] = ChunkTask(key, _not_here, name, number, TaskRef(barrier))
        read = {dep for task in graph.values() for dep in task.dependencies}
        for key in constants.keys() - read - set(keys):
            graph.pop(key, None)
        return lost

    def _problem(self, draft: Draft, whole: bool) -> RegionProblem | None:
        """Return the problem of a region; None unless its run is expected to be clearly faster."""
        inputs, workers, array = draft.inputs, self._workers(), self._array_of(draft.inputs)
        number = {key: value for value, key in enumerate([*inputs, *draft.tasks])}
        needs = [
            [number[dep] for dep in task.dependencies if dep not in draft.constants] for task in draft.tasks.values()
        ]
        places = {ws.address: at for at, ws in enumerate(workers)}
        held, where = [], []
        for at, key in enumerate(inputs):
            ts, holder = self._scheduler.tasks.get(key), places.get(self._place(key))
            held.append(max(0, ts.nbytes) if ts and ts.who_has else 0)
            where.append(at * len(workers) // len(inputs) if holder is None else holder)
        sizes, seconds = list(held), []
        for (key, task), values in zip(draft.tasks.items(), needs, strict=True):
            name = key_split(key)
            read = [sizes[value] for value in values]
            seconds.append(self._duration(name, sum(read) / _READS[array]))
            sizes.append(
                root_bytes(task) or 0 if not task.dependencies else expected_size(name, is_product(task), read)
            )
        sizes = sizes[len(inputs) :]
        assignment = assign(needs, sizes, seconds, held, where, len(workers))
        if draft.products and max(assignment.moved) > _MOVED[array]:
            return None
        every = [key for chunks in draft.results.values() for key in chunks]
        costs, threads = dask_costs(), [ws.nthreads for ws in workers]
        # The scheduler and all ranks look at each task, as at each chunk.
        around = costs.run * (1.0 if whole else 0.5) + (len(number) + len(every)) * costs.chunk
        run = around + expected_seconds(assignment, threads)
        # Dask's own tasks run where their chunks are, too, unless others have had nothing to do for long.
        work = max(sum(seconds) / sum(threads), max(seconds, default=0.0))
        local = max(spent / max(1, count) for spent, count in zip(assignment.seconds, threads, strict=True))
        work = max(work, min(local, work + _STEALS))
        plain = sum(key in draft.inside and key not in draft.products for key in draft.tasks)
        products = len(draft.products) * (costs.run + costs.chunk * len(inputs))
        own = whole * bool(plain) * costs.start + plain * costs.task + products
        draft.seconds = work, run - work, own
        name = f"region-{tokenize(every, inputs)}"
        if not every or run - work >= CLEARLY * own or barrier_key(name) in self._scheduler.tasks:
            return None
        return RegionProblem(
            name=name,
            matrices=(operand(INPUTS, held), operand(TASKS, sizes)),
            wanted=tuple(
                NamedMatrix(name, ((0,) * len(chunks), (1,)), "uint8", places=tuple(key[1:] for key in chunks))
                for name, chunks in draft.results.items()
            ),
            options=read_options(),
            array=array,
            needs=needs,
            results=[number[key] - len(inputs) for key in every],
            sizes=sizes,
            seconds=seconds,
            counts=draft.counts,
        )

    def _place(self, key: Any) -> str | None:
        """Return the address of a worker that has a chunk."""
        ts = self._scheduler.tasks.get(key)
        return next((ws.address for ws in (ts.who_has or ())), None) if ts is not None else None

    def _workers(self) -> list[Any]:
        return [ws for ws in self._scheduler.workers.values() if ws.status.name == "running"]

    def _array_of(self, inputs: Collection[Any]) -> str:
        """Return the array kind of a region's inputs: CuPy's if it is unknown and the workers have GPUs.

        ``"cupy"`` or ``"numpy"``.
        """
        kinds = {str(ts.type or "") for key in inputs if (ts := self._scheduler.tasks.get(key)) is not None}
        on_gpus = any("gpu" in (ws.extra or {}) for ws in self._workers())
        return "cupy" if any(kind.startswith("cupy") for kind in kinds) or (on_gpus and kinds <= {""}) else "numpy"

    def _duration(self, name: str, guess: float) -> float:
        """Return the average seconds of tasks of this name; a guess if none has run."""
        prefix = self._scheduler.task_prefixes.get(name)
        average = self._seconds.get(name, prefix.duration_average if prefix is not None else -1.0)
        return average if average >= 0 else guess

    def learn(self, problem: RegionProblem, answers: Iterable[Done]) -> None:
        """Record the durations of a run's tasks."""
        spent: collections.Counter[str] = collections.Counter()
        for answer in answers:
            spent.update({name: seconds for name, seconds in answer.timings.items() if name in problem.counts})
        for name, seconds in spent.items():
            each = seconds / problem.counts[name]
            # The first call may have compiled something.
            self._seconds[name] = min(each, (each + self._seconds.get(name, each)) / 2)


def put_back(scheduler: Scheduler, barrier: TaskState) -> bool:
    """Give the tasks of a region back to Dask; return whether a barrier is a region's."""
    _, (*_, packed) = operand_keys(barrier.run_spec)
    if not all(isinstance(entry, tuple) and isinstance(entry[0], GraphNode) for entry in packed) or not packed:
        return False
    tasks: dict[Any, GraphNode] = {}
    for task, _, constants in packed:
        tasks |= {key: DataNode(key, value) for key, value in constants.items()}
        tasks[task.key] = task
    direct.put_back(scheduler, barrier, tasks, f"distmm-back-{barrier.key}")
    return True


def _not_here(*args: Any) -> Any:
    raise EngineError("the tasks of a region run on a cluster only")
