"""A Computation: all that the runtime reads of the thing that is computed, be it a product or a factorization.

It has operands, whose chunks are there before the run, and outputs, whose chunks the run makes. Each of them is a
`NamedMatrix` in chunks, which are numbered in C order. A computation that makes some chunks of a larger one's outputs
from some chunks of its operands is a part of it, and its matrices know which chunks these are.

Workers as planning sees them (Worker), and what a multiply asks of them (Demand).

Both are frozen values, which cross the network.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from dask_distmm._version import __version__
from dask_distmm.compat import cached_property
from dask_distmm.config import Machine, Options
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.model import engine_alone
from dask_distmm.planning.wire import TEXT, Wired

# Workers as planning sees them (Worker), and what a multiply asks of them (Demand)


@dataclasses.dataclass(frozen=True, slots=True)
class Worker(Wired):
    """A worker as planning sees it."""

    what: ClassVar[str] = "worker"

    # Its address in the Dask cluster.
    address: str
    # Number of its threads.
    nthreads: int = 1
    # In bytes, of the memory that the chosen engine works in; 0 where it has none.
    memory_limit: int = 0
    # Name of its machine: workers of one host have the faster links.
    host: str = ""
    # Its GPU, and those whose memory that GPU can read, by names that are the same in all processes; empty where it
    # has none.
    device: str = ""
    reach: tuple[str, ...] = ()
    # Bytes of that memory which its process holds beside what Dask can spill.
    used: int = 0
    # Where that is the memory of a GPU: the limit of its host memory in bytes, 0 where it has none.
    host_limit: int = 0

    def reaches(self, holder: Worker) -> bool:
        """Whether its GPU can read the memory of another worker's, as far as they have said anything."""
        return self.host == holder.host and (self.device == holder.device or holder.device in self.reach)


@functools.lru_cache(maxsize=16)
def islands(workers: tuple[Worker, ...]) -> list[int]:
    """Return for each worker the first one of its island: of those whose GPUs all read each other's memory."""
    island_of: dict[tuple[str, str, tuple[str, ...]], int] = {}
    # Of each island one worker of each kind.
    members: dict[int, list[Worker]] = {}
    for index, worker in enumerate(workers):
        if (kind := (worker.host, worker.device, worker.reach)) not in island_of:
            near = (
                first
                for first, inside in members.items()
                if all(worker.reaches(member) and member.reaches(worker) for member in inside)
            )
            island_of[kind] = next(near, index)
            members.setdefault(island_of[kind], []).append(worker)
    return [island_of[worker.host, worker.device, worker.reach] for worker in workers]


@dataclasses.dataclass(frozen=True, slots=True)
class Demand(Wired):
    """What a computation requires of the workers of a cluster."""

    what: ClassVar[str] = "demand"

    # Name of the engine, or ``"auto"``.
    engine: str
    # What the chunks of D are: ``"numpy"`` or ``"cupy"``.
    array: str
    # Names of the types of A, B and D.
    dtypes: tuple[str, str, str]
    # Addresses, or how many, or None for all.
    workers: tuple[str, ...] | int | None = None
    # Whether matrices may cross a network unencrypted though the cluster requires encryption.
    plaintext_nccl: bool = False
    # The kind of the computation, ``"product"`` or ``"factorization"``.
    kind: str = "product"
    # The package's version on the client that asks.
    version: str = __version__

    def check(self) -> None:
        """Raise for an unknown type."""
        for name in self.dtypes:
            dtype_from_name(name)


# The matrices of a computation


# Dask's chunk sizes along rows and columns.
Chunks = tuple[tuple[int, ...], tuple[int, ...]]
# Numbers of chunks along an axis.
Numbers = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class NamedMatrix(Wired):
    """A matrix in chunks that a run reads or makes."""

    # Its name beside the computation's own; empty for the output that has the computation's name.
    name: str
    # Its chunk sizes along both axes.
    chunks: Chunks
    # Name of its type.
    dtype: str
    # The axes that its array has: a vector has one of them, along which the matrix is, a number none.
    axes: tuple[int, ...] = (0, 1)
    # Of an operand: name of the array whose chunks a run is given, empty where nothing of it may be on the workers
    # already; whether it is the transpose of that, of which views are taken, and the conjugate of this.
    array: str = ""
    transposed: bool = False
    conjugated: bool = False
    # Whether ranks make its chunks themselves when they need them; none is in memory before. Whether these are sparse.
    by_ranks: bool = False
    sparse: bool = False
    # In a part of a larger computation: numbers of its rows and columns of chunks in the larger one's matrix, and how
    # many columns of chunks that has.
    numbers: tuple[Numbers, Numbers, int] | None = None
    # The places of its chunks in its array, where that has other axes than the matrix.
    places: tuple[tuple[int, ...], ...] = ()

    def check(self) -> None:
        """Raise for axes that do not exist, and for chunk numbers that do not fit the chunks."""
        missing = {0, 1} - {*self.axes}
        if self.axes not in ((0, 1), (0,), (1,), ()) or any(self.chunks[axis] != (1,) for axis in missing):
            raise ValueError(f"an array of the axes {self.axes} of a matrix in chunks {self.chunks}")
        if self.numbers is not None and tuple(map(len, self.numbers[:2])) != self.counts:
            raise ValueError(f"a part of other chunks than {self.counts}")
        dtype_from_name(self.dtype)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Its rows and columns."""
        rows, cols = map(sum, self.chunks)
        return rows, cols

    @property
    def counts(self) -> tuple[int, int]:
        """Chunks along rows and columns."""
        return len(self.chunks[0]), len(self.chunks[1])

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.chunks[0]) * len(self.chunks[1])

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_from_name(self.dtype).itemsize

    @property
    def elements(self) -> NDArray[np.int64]:
        """Elements of every chunk, in C order."""
        rows, cols = (np.asarray(sizes, np.int64) for sizes in self.chunks)
        return np.multiply.outer(rows, cols).ravel()

    @property
    def bytes(self) -> NDArray[np.int64]:
        """Bytes of every chunk."""
        return self.elements * self.itemsize

    def chunk_shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of a chunk."""
        i, j = divmod(index, len(self.chunks[1]))
        return self.chunks[0][i], self.chunks[1][j]

    @cached_property
    def in_whole(self) -> tuple[Sequence[int], Sequence[int], int]:
        """Numbers of its rows and columns of chunks in the matrix that the user sees, and that one's columns."""
        rows, cols = self.counts
        return (range(rows), range(cols), cols) if self.numbers is None else self.numbers

    def at(self, index: int) -> tuple[int, int]:
        """Row and column of a chunk in the matrix that the user sees."""
        rows, cols, _ = self.in_whole
        i, j = divmod(index, len(cols))
        return rows[i], cols[j]

    @property
    def every(self) -> NDArray[np.int64]:
        """Numbers of all its chunks in the matrix that the user sees."""
        rows, cols, columns = self.in_whole
        return np.add.outer(np.asarray(rows, np.int64) * columns, np.asarray(cols, np.int64)).ravel()

    def place(self, number: int) -> tuple[int, ...]:
        """Return the place of a chunk in its array, by its number in the matrix that the user sees."""
        if self.places:
            return self.places[number]
        i, j = at = divmod(number, self.in_whole[2])
        if len(self.axes) < 2:
            return tuple(at[axis] for axis in self.axes)
        return (j, i) if self.transposed else at

    def part(self, rows: Sequence[int], cols: Sequence[int], **changes: Any) -> Self:
        """Return some of its rows and columns of chunks."""
        of_rows, of_cols, columns = self.in_whole
        return dataclasses.replace(
            self,
            chunks=(tuple(self.chunks[0][i] for i in rows), tuple(self.chunks[1][j] for j in cols)),
            numbers=(tuple(of_rows[i] for i in rows), tuple(of_cols[j] for j in cols), columns),
            **changes,
        )


# A Computation: all that the runtime reads of the thing that is computed, be it a product or a factorization


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation(Wired):
    """The base of `Problem`, `FactorProblem` and `ProgramProblem`: all that graphs and the runtime ask them."""

    what: ClassVar[str] = "problem"
    kind: ClassVar[str]

    # Names the main output's array, and the computation everywhere.
    name: str
    # The matrices that are read, in the order of their numbers: ranks convert their types. And those that are made.
    matrices: tuple[NamedMatrix, ...]
    wanted: tuple[NamedMatrix, ...]
    # What the run needs of the client's configuration.
    options: Options = dataclasses.field(metadata=TEXT)
    # As asked for; ``"auto"`` leaves the choice to the cost model.
    method: str = "auto"
    engine: str = "auto"
    # Addresses to use, or their number, or None for all.
    workers: tuple[str, ...] | int | None = None
    # The kind of the outputs' chunks: ``"numpy"`` or ``"cupy"``.
    array: str = "numpy"
    # Whether the user gives A up: its chunks may go as soon as they have been read for the last time.
    overwrite_a: bool = False
    # The array of which this makes a part; empty where it makes all.
    whole: str = ""

    def __getitem__(self, name: str) -> NamedMatrix:
        """Return an operand by its name, or a matrix that is wanted; the main output is ``"d"``."""
        return self._by_name[name]

    def __getstate__(self) -> dict[str, Any]:
        """Omit cached properties from pickles."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def _by_name(self) -> dict[str, NamedMatrix]:
        return {matrix.name or "d": matrix for matrix in (*self.wanted, *self.matrices)}

    @property
    def compute_type(self) -> np.dtype:
        """NumPy type that is computed in."""
        raise NotImplementedError

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        raise NotImplementedError

    @property
    def shared(self) -> bool:
        """Whether operands are made of the same chunks, so that each is held once."""
        return False

    @property
    def accumulates_in_place(self) -> bool:
        """Whether sums of an earlier run can grow in place."""
        return False

    @property
    def remedies(self) -> list[str]:
        """Remedies to suggest if it does not fit in memory, as it was requested."""
        if self.method == "local":
            return ["use method='auto', by which workers share it"]
        return ["use more workers" if self.workers is None else "name more workers by workers="]

    @property
    def result_name(self) -> str:
        """Name of the array that the user has, also where this is a part of its computation."""
        return self.whole or self.name

    @property
    def demand(self) -> Demand:
        """The demand that it makes on the workers."""
        plaintext = self.options.allow_plaintext_nccl
        requirements = self.engine, self.array, self.dtypes_of_work, self.workers, plaintext
        return Demand(*requirements, self.kind, self.options.version)

    @property
    def dtypes_of_work(self) -> tuple[str, str, str]:
        """Names of the types with which an engine is asked whether it takes a computation."""
        return (self.compute_type.name,) * 3

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the matrices that are read, in the order of their numbers."""
        return tuple(matrix.name for matrix in self.matrices)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the operands whose chunks a run is given: one that is the same as another is not among them."""
        return self.operands

    @cached_property
    def by_ranks(self) -> tuple[str, ...]:
        """Names of the operands whose chunks ranks make."""
        return tuple(matrix.name for matrix in self.matrices if matrix.by_ranks)

    def made_by_ranks(self, names: Collection[str]) -> Self:
        """Return the same computation, in which ranks compute the chunks of only these operands."""
        if set(names) == set(self.by_ranks):
            return self
        matrices = (dataclasses.replace(matrix, by_ranks=matrix.name in names) for matrix in self.matrices)
        return dataclasses.replace(self, matrices=tuple(matrices))

    @property
    def kept(self) -> Collection[str]:
        """Names of the operands of which workers keep two copies until the run is done."""
        return ()

    @property
    def donated(self) -> tuple[str, ...]:
        """Names of the operands whose memory may be reused once all ranks have read them (A, if overwritten)."""
        return ("a",) if self.overwrite_a and not self["a"].by_ranks else ()

    def unnamed(self, name: str = "") -> Self:
        """Return the same computation without names, except which factors are the same; plans are kept by it."""

        def unnamed(matrix: NamedMatrix, array: str = "") -> NamedMatrix:
            same = matrix.array == array and matrix.numbers is None
            return matrix if same else dataclasses.replace(matrix, array=array, numbers=None)

        arrays = ("x", "x") if self.shared else ()
        matrices = itertools.starmap(unnamed, itertools.zip_longest(self.matrices, arrays, fillvalue=""))
        return dataclasses.replace(
            self, name=name, whole="", matrices=tuple(matrices), wanted=tuple(map(unnamed, self.wanted))
        )

    def keeping(self) -> Self:
        """Return the same computation without donated operands."""
        return dataclasses.replace(self, overwrite_a=False) if self.overwrite_a else self

    def making(self, outputs: Collection[str]) -> Self:
        """Return the same computation, which may omit all other outputs."""
        return self

    @property
    def outputs(self) -> tuple[NamedMatrix, ...]:
        """The matrices that are computed."""
        return self.wanted

    @property
    def engine_alone(self) -> str:
        """Name of the engine to use without a cluster."""
        return self.engine if self.engine != "auto" else engine_alone(self.array, self.kind)

    def machine_of_tasks(self, engine: str) -> Machine:
        """Return the constants for Dask's own tasks on workers of an engine: they leave NumPy chunks to the CPU."""
        return self.options.machine("numpy" if self.array == "numpy" else engine)

    def source_of(self, operand: str) -> str:
        """Name of the input whose chunks are those of an operand: its own, or that of an operand that is the same."""
        return operand

    def output(self, name: str) -> NamedMatrix:
        """Return an output by its name."""
        return next(output for output in self.outputs if output.name == name)

    def check(self) -> None:
        """Raise if sizes of chunks or the kind of the arrays can't be."""
        every = [matrix.chunks for matrix in (*self.matrices, *self.outputs)]
        if any(size < 0 for chunks in every for sizes in chunks for size in sizes):
            raise ValueError(f"negative chunk sizes in {every}")
        if self.array not in ("numpy", "cupy"):
            raise ValueError(f"array {self.array!r}")
