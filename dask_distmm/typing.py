"""The options of `matmul` and its relatives, for type checkers. Pure: names, and no values.

Each option is declared here once, with its type; `arrays.request` has its default, and the docstring of `matmul` its
meaning. Functions that take options are annotated ``**options: Unpack[...]``; their signatures list them all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np

from dask_distmm.numeric.epilogs import AnyEpilog, AuxEpilog, PlainEpilog
from dask_distmm.planning.problem import Distribution

if TYPE_CHECKING:
    import dask.array as da

__all__ = [
    "AnyEpilog", "ArrayLike", "AuxEpilog", "Batch", "BlockFormat", "Chunks", "ComputeType", "DType", "Distribution",
    "Engine", "EpilogFunction", "GroupedOptions", "MatmulOptions", "Method", "Op", "PlainEpilog", "PreparedOptions",
    "Scaled", "WithAux",
]  # fmt: skip


class SupportsShape(Protocol):
    """An array of any package (Dask, NumPy, CuPy, dask-array), or a `BlockScaled`."""

    @property
    def shape(self) -> Any:
        """Lengths of the axes."""


T_co = TypeVar("T_co", covariant=True)


class Nothing(Protocol[T_co]):
    """What no value is, and every value resembles, as ``Nothing[Never]``.

    For a call that fits no overload mypy names the wrong argument if each argument resembles what an overload takes,
    and else prints all overloads.
    """

    def __sizeof__(self) -> T_co: ...  # type: ignore[override]


class NoSuchOption(Nothing[T_co], Protocol[T_co]):
    """By its name mypy says what is wrong with a call of `dask_distmm.matmul`, as by those below."""


class OneArgumentFewer(Nothing[T_co], Protocol[T_co]):
    """The type of a fourth operand."""


class TwoOperands(Nothing[T_co], Protocol[T_co]):
    """The type of a single operand."""


NoOther: TypeAlias = Nothing[Never]

# An array, or nested lists of numbers. Text is neither; `numpy.typing.ArrayLike` would allow it.
ArrayLike: TypeAlias = SupportsShape | list[Any] | tuple[Any, ...] | NoOther
# D, and the auxiliary outputs by name.
WithAux: TypeAlias = "tuple[da.Array, dict[str, da.Array]]"

Op: TypeAlias = Literal["N", "T", "C"]
Method: TypeAlias = Literal["auto", "local", "allgather", "reducescatter", "allreduce", "summa"]
# Those of this package. A type checker does not know engines that a program registers: `typing.cast` helps there.
Engine: TypeAlias = Literal["auto", "peer", "cublasmp", "nccl", "numpy"]
Batch: TypeAlias = Literal["auto", "items", "collective"]
# The types that `quantize` makes: one scale for a matrix, and one for each block.
Scaled: TypeAlias = Literal["float8_e4m3", "float8_e5m2"]
BlockFormat: TypeAlias = Literal["mxfp8", "nvfp4"]
ComputeType: TypeAlias = Literal["fp32", "tf32", "bf16x9", "fp64", "fp64_emulated"]
# Chunks in the forms that Dask takes.
Chunks: TypeAlias = int | str | Sequence[Any] | Mapping[int, Any]
EpilogFunction: TypeAlias = Callable[..., Any]
# NumPy's DTypeLike without records, which takes ten times as much room in the messages of type checkers.
DType: TypeAlias = str | type[Any] | np.dtype[Any]


class SharedOptions(TypedDict, total=False):
    """Options of all functions that multiply."""

    alpha: complex | NoOther
    op_a: Op | NoOther
    op_b: Op | NoOther
    method: Method | NoOther | None
    engine: Engine | NoOther | None
    workers: Sequence[str] | int | NoOther | None


class GroupedOptions(SharedOptions, total=False):
    """Options of `dask_distmm.matmul_grouped` and `explain_grouped`."""

    epilog: PlainEpilog | EpilogFunction | None
    batch: Batch | None


class PreparedOptions(SharedOptions, total=False):
    """Options of `dask_distmm.Matmul`."""

    beta: complex | NoOther | None
    out_chunks: Chunks | NoOther | None
    distributions: Sequence[Distribution | None] | NoOther | None
    logger: logging.Logger | NoOther | None
    a_type: DType | NoOther | None
    b_type: DType | NoOther | None
    result_type: DType | NoOther | None
    quantization_scales: Mapping[str, Any] | NoOther | None
    compute_type: ComputeType | NoOther | None


class MatmulOptions(PreparedOptions, total=False):
    """Options of `dask_distmm.matmul` and `explain` but `epilog` and `result_amax`, which decide what is returned."""

    epilog_inputs: Mapping[str, ArrayLike] | NoOther | None
    bias_axis: Literal[-1, 0] | NoOther
    batch: Batch | NoOther | None
    gathered: Literal["a", "b"] | NoOther | None


class AllOptions(MatmulOptions, total=False):
    """Options of `dask_distmm.matmul` and `explain`."""

    epilog: AnyEpilog | EpilogFunction | NoOther | None
    result_amax: bool | NoOther
