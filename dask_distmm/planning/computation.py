"""A Computation: all that the runtime reads of the thing that is computed, be it a product or a factorization.

It has named operands, whose chunks are there before the run, and named outputs, whose chunks the run makes. Every
operand and every output is a matrix in chunks; chunks are numbered in C order.

Workers as planning sees them (Worker), and what a multiply asks of them (Demand).

Both are frozen values, which cross the network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from dask_distmm.config import Machine, Options
from dask_distmm.numeric.types import dtype_from_name
from dask_distmm.planning.model import engine_alone
from dask_distmm.planning.wire import Wired

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


@dataclasses.dataclass(frozen=True, slots=True)
class Demand(Wired):
    """The demand that a multiply makes on the workers of a cluster."""

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

    def check(self) -> None:
        """Raise for a type that there is not."""
        for name in self.dtypes:
            dtype_from_name(name)


# Which part of a larger multiply a problem is


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Which chunks of a larger multiply's arrays are those of a problem."""

    # For each operand, and ``"d"``: its name, numbers of its rows and columns of chunks in the larger multiply, and
    # how many columns of chunks there are in that.
    numbers: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]
    # Name of the larger multiply.
    whole: str

    @property
    def ncols(self) -> int:
        """How many columns of chunks D has in the larger multiply."""
        return self.of("d")[2]

    def at(self, operand: str, index: int) -> tuple[int, int]:
        """Return row and column in the larger multiply of chunk `index` of an operand, or of ``"d"``."""
        rows, cols, _ = self.of(operand)
        i, j = divmod(index, len(cols))
        return rows[i], cols[j]

    def every(self, operand: str) -> NDArray[np.int64]:
        """Return the numbers in the larger multiply of all chunks of an operand, or of ``"d"``."""
        rows, cols, ncols = self.of(operand)
        return np.add.outer(np.asarray(rows, np.int64) * ncols, np.asarray(cols, np.int64)).ravel()

    def of(self, operand: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the numbers of an operand's rows and columns of chunks, and how many columns the whole one has."""
        return next((rows, cols, ncols) for name, rows, cols, ncols in self.numbers if name == operand)


# A Computation: all that the runtime reads of the thing that is computed, be it a product or a factorization


# Dask's chunk sizes along rows and columns.
Chunks = tuple[tuple[int, ...], tuple[int, ...]]


def chunk_elements(chunks: Chunks) -> NDArray[np.int64]:
    """Return the elements of every chunk of a matrix, in C order."""
    rows, cols = (np.asarray(sizes, np.int64) for sizes in chunks)
    return np.multiply.outer(rows, cols).ravel()


@dataclasses.dataclass(frozen=True, slots=True)
class NamedMatrix(Wired):
    """A matrix that a run makes, or one beside A and B that a formula reads: C, a bias, what was saved."""

    # Its name beside the computation's own; empty for the output that has the computation's name.
    name: str
    # Its chunk sizes along both axes.
    chunks: Chunks
    # Name of its type.
    dtype: str
    # The axes that its array has: a vector has one of them, along which the matrix is.
    axes: tuple[int, ...] = (0, 1)

    def check(self) -> None:
        """Raise for axes that there are not."""
        if self.axes not in ((0, 1), (0,), (1,)) or any(self.chunks[axis] != (1,) for axis in {0, 1} - {*self.axes}):
            raise ValueError(f"an array of the axes {self.axes} of a matrix in chunks {self.chunks}")

    def place(self, number: int, columns: int) -> tuple[int, ...]:
        """Return the place in its array of a chunk, by its number in the matrix with its columns of chunks."""
        at = divmod(number, columns)
        return at if len(self.axes) > 1 else (at[self.axes[0]],)

    @property
    def counts(self) -> tuple[int, int]:
        """Chunks along rows and columns."""
        return len(self.chunks[0]), len(self.chunks[1])

    @property
    def count(self) -> int:
        """How many chunks it has."""
        return math.prod(self.counts)


class Computation(Wired):
    """The base of `Problem` and `FactorProblem`: all that graphs and the runtime ask them."""

    __slots__ = ()
    what: ClassVar[str] = "problem"
    kind: ClassVar[str]

    if TYPE_CHECKING:
        # Names the main output's array, and the computation everywhere.
        name: str
        # Name of the engine as asked for; ``"auto"`` leaves the choice to the cost model.
        engine: str
        # The kind of the chunks: ``"numpy"`` or ``"cupy"``.
        array: str
        # Addresses to use, or their number, or None for all.
        workers: tuple[str, ...] | int | None
        # The configuration that the run needs.
        options: Options

        # Unless a subclass says otherwise: for each operand by name Dask's chunk sizes along both axes, and the name of
        # its type, which ranks convert; the name of the type that is computed in; the outputs to be made.
        chunks: Mapping[str, Chunks]
        dtypes: Mapping[str, str]
        compute_type: Any
        wanted: tuple[NamedMatrix, ...]

        # Fields of a dataclass in some subclasses, which would take a property here for their defaults.
        @property
        def overwrite_a(self) -> bool:
            """Whether the user gives A up."""

        @property
        def part(self) -> Part | None:
            """The part of a larger computation that this is."""

    @property
    def result_name(self) -> str:
        """Name of the array that the user has, also where this is a part of its computation."""
        return self.name

    @property
    def demand(self) -> Demand:
        """The demand that it makes on the workers."""
        plaintext = self.options.allow_plaintext_nccl
        return Demand(self.engine, self.array, self.dtypes_of_work, self.workers, plaintext, self.kind)

    @property
    def dtypes_of_work(self) -> tuple[str, str, str]:
        """Names of the types with which an engine is asked whether it takes a computation."""
        return (self.compute_type,) * 3

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the arrays that are read, in the order of their numbers."""
        return tuple(self.chunks)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the operands whose chunks a run is given: one that is the same as another is not among them."""
        return self.operands

    @property
    def donated(self) -> tuple[str, ...]:
        """Names of the operands that are of no use to the user once all ranks have read them: A, to be overwritten."""
        return ("a",) if self.overwrite_a else ()

    def keeping(self) -> Self:
        """Return the same computation, which frees no operand early."""
        return dataclasses.replace(self, overwrite_a=False) if self.overwrite_a else self  # type: ignore[type-var]

    def making(self, outputs: Collection[str]) -> Self:
        """Return the same computation, which may leave out all other outputs."""
        return self

    @property
    def outputs(self) -> tuple[NamedMatrix, ...]:
        """The arrays that are made."""
        return self.wanted

    @property
    def engine_alone(self) -> str:
        """Name of the engine to use without a cluster."""
        return self.engine if self.engine != "auto" else engine_alone(self.array, self.kind)

    def machine_of_tasks(self, engine: str) -> Machine:
        """Return the constants for Dask's own tasks on workers of an engine: they leave NumPy chunks to the CPU."""
        return self.options.machine("numpy" if self.array == "numpy" else engine)

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        raise NotImplementedError

    def chunks_of(self, operand: str) -> Chunks:
        """Chunk sizes of an operand."""
        return self.chunks[operand]

    def dtype_of(self, operand: str) -> str:
        """Name of the type of an operand."""
        return self.dtypes[operand]

    def chunk_counts(self, operand: str) -> tuple[int, int]:
        """Chunks along rows and columns of an operand."""
        rows, cols = self.chunks_of(operand)
        return len(rows), len(cols)

    def is_transposed(self, operand: str) -> bool:
        """Whether an operand's chunks are the transposes of those that a run is given."""
        return False

    def is_conjugated(self, operand: str) -> bool:
        """Whether an operand is the conjugate of the chunks that a run is given."""
        return False

    def source_of(self, operand: str) -> str:
        """Name of the input whose chunks are those of an operand: its own, or that of an operand that is the same."""
        return operand

    def place_of(self, operand: str, index: int) -> tuple[int, int]:
        """Row and column of an operand's chunk in the computation that the user sees."""
        return divmod(index, self.chunk_counts(operand)[1])

    def output(self, name: str) -> NamedMatrix:
        """Return an output by its name."""
        return next(one for one in self.outputs if one.name == name)

    def numbers(self, name: str) -> NDArray[np.int64]:
        """Numbers of all chunks of an operand or an output in the computation that the user sees."""
        return np.arange(math.prod(self.chunk_counts(name) if name in self.operands else self.output(name).counts))

    def columns(self, output: str) -> int:
        """How many columns of chunks an output has in the computation that the user sees."""
        return self.output(output).counts[1]

    def check(self) -> None:
        """Raise if sizes of chunks, types or the kind of the arrays can't be."""
        every = [self.chunks_of(name) for name in self.operands] + [output.chunks for output in self.outputs]
        if any(size < 0 for chunks in every for sizes in chunks for size in sizes):
            raise ValueError(f"negative chunk sizes in {every}")
        for name in (*map(self.dtype_of, self.operands), *(output.dtype for output in self.outputs)):
            dtype_from_name(name)
        if self.array not in ("numpy", "cupy"):
            raise ValueError(f"array {self.array!r}")
