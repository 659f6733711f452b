"""Common to functions of `dask_distmm.linalg`: options of a run, the check of every value, their names in errors.

A function is annotated ``**how: Unpack[RunOptions]``, and its values by types; `stacks.public` makes its signature and
its docstring list the options and the costs, and refuses what is not among the options and what the annotations do not
allow. The rule for names and places is on the page *Linear algebra*: those of NumPy, else SciPy's; the tables of
signatures and costs on that page are made from these functions.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import math
import numbers
import re
import reprlib
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np
from dask.array.core import Array

from dask_distmm.errors import PlanError, unknown_name
from dask_distmm.typing import ArrayLike, Engine, Method

# What a function takes in place of an array.
Operand: TypeAlias = Array | ArrayLike

if TYPE_CHECKING:
    EigResult = NamedTuple("EigResult", [("eigenvalues", Array), ("eigenvectors", Array)])  # noqa: UP014
    EighResult = NamedTuple("EighResult", [("eigenvalues", Array), ("eigenvectors", Array)])  # noqa: UP014
    QRResult = NamedTuple("QRResult", [("Q", Array), ("R", Array)])  # noqa: UP014
    SlogdetResult = NamedTuple("SlogdetResult", [("sign", Array), ("logabsdet", Array)])  # noqa: UP014
    SVDResult = NamedTuple("SVDResult", [("U", Array), ("S", Array), ("Vh", Array)])  # noqa: UP014
else:
    # NumPy's named tuples. It has no public names for them.
    _one = np.ones((1, 1))
    EigResult, EighResult = type(np.linalg.eig(_one)), type(np.linalg.eigh(_one))
    QRResult = type(np.linalg.qr(_one))
    SlogdetResult, SVDResult = type(np.linalg.slogdet(_one)), type(np.linalg.svd(_one))


class RunOptions(TypedDict, total=False):
    """The options of a run.

    Parameters
    ----------
    engine : str, optional
        ``"numpy"``, ``"peer"``, ``"cublasmp"`` or ``"nccl"``; by default the one that the cost model chooses.
    workers : sequence of str or int, optional
        Addresses of the workers that may take part, or their number; all by default.
    method : {"auto", "local", "columns", "rows"}, optional
        ``"local"``: one worker has the whole matrix. ``"columns"``: all workers have block columns. ``"rows"``, where a
        function has that for tall matrices: chunks of rows stay where they are. ``"auto"``, the default: the fastest by
        the cost model.
    """

    engine: Engine | None
    workers: Sequence[str] | int | None
    method: Literal["auto", "local", "columns", "rows"] | None


class SolveOptions(RunOptions, total=False):
    """The options of functions that refuse elements that are NaN or infinite; a rank finds them while it copies.

    Parameters
    ----------
    check_finite : bool
        Whether NaN and infinities are refused, which costs no further pass over the matrix.
    """

    check_finite: bool


class FactorOptions(SolveOptions, total=False):
    """The options of functions that can free A's chunks early.

    Parameters
    ----------
    overwrite_a : bool
        Whether chunks of `a` may be freed as soon as all workers have read them. Those that something else needs stay.
    """

    overwrite_a: bool


class RefinedOptions(FactorOptions, total=False):
    """The options of functions that can factorize in fewer bits than A has, and refine what they solve.

    Parameters
    ----------
    factor_dtype : {"float32", "tf32", "float16", "bfloat16"}, optional
        The type in which the matrix is factorized, which takes less time and memory than its own. What is solved with
        such factors is refined until it is as good as without: in a few turns if the matrix is well-conditioned;
        otherwise the matrix itself is factorized in the same run. Complex matrices take complex factors. ``"tf32"``,
        ``"float16"`` and ``"bfloat16"`` are the types of products on GPUs; all else is computed in float32.
    """

    factor_dtype: Literal["float32", "tf32", "float16", "bfloat16"] | None


class ProductOptions(TypedDict, total=False):
    """The options of a product, as `dask_distmm.matmul` takes them.

    Parameters
    ----------
    method : str, optional
        As `dask_distmm.matmul` takes it; by default the fastest by the cost model.
    """

    engine: Engine | None
    workers: Sequence[str] | int | None
    method: Method | None


def texts_of(options: type) -> dict[str, str]:
    """Return what the docstring of options says about each of them, by their names."""
    listed = inspect.cleandoc(options.__doc__ or "").partition("----------\n")[2]
    return {text.partition(" ")[0]: text for text in re.split(r"\n(?=\S)", listed)}


# Costs of functions: where they run, what a worker holds beside its chunks of operands and results, and what becomes of
# NaN, if it is not an error in the end.
Cost: TypeAlias = tuple[str, str] | tuple[str, str, str]
_CARRIED = "NaN and infinities go where NumPy's would."
_SHARE = "its share of the matrix and two panels; on one worker the whole matrix"
_ROWS = "tall matrices: chunks of rows stay where they are, n x n matrices travel"
PANELS = "one run: block columns on all workers, or one worker", _SHARE
TWO_SOLVES = "two runs, each with block columns on all workers, or on one worker", _SHARE
TASKS = "Dask's own tasks", "a chunk", _CARRIED
TALL = (
    f"one run; {_ROWS}; others: block columns on all workers, or one worker",
    f"tall matrices: n x n; others: {_SHARE}",
)
LEAST_SQUARES = (
    f"{TALL[0]}, or with `rcond` two or three runs, an SVD on one worker and products",
    f"{TALL[1]}; with `rcond` that of `svd`",
)
ROWS = (
    "one run: chunks of rows stay where they are, n x n matrices travel",
    "n x n, for each value of `alpha` once more",
)
EIGEN = (
    "one run on one worker; large matrices on several GPUs: block columns on all of them",
    "one worker: six times the matrix; block columns: its share of the matrix and of the vectors, twice",
)
ALONE = (
    "one run on one worker; matrices on GPUs by its host, where cuSOLVER lacks a function",
    "eight times the matrix; `sqrtm` and `logm` of a real one fifteen and twenty times",
)
SINGULAR = (
    f"one run; {_ROWS}; others: one worker, or large matrices on GPUs several runs on all workers",
    "tall matrices: n x n; others: twelve times the matrix on one worker",
)
NORM = (
    "`ord` 2, -2 and 'nuc' of a matrix: as `svdvals`; all other norms: Dask's own tasks, in which NaN is computed with",
    "as `svdvals`; other norms: a chunk",
)
POLAR = (
    "several runs: on all workers (QDWH), or an SVD on one worker and products",
    "on all workers: that of its products and factorizations; on one: that of `svd`",
)
COMPRESSED = (
    "tall and wide matrices: one run, which reads them 1 + `n_power_iter` times, or once again; others: many runs",
    "vectors: k + `n_oversamples` for each row and column",
)
COMPONENTS = (
    "tall matrices: one run, which reads them once or twice; others: as `svd`",
    "tall matrices: n x n; others as `svd`",
)
MOMENTS = (
    "many more observations than variables: one run, which reads them once; others: a product on all workers",
    "observations stay where they are, n x n; others: those of the product",
)
POWERS = (
    "one run: products on all workers, of which each has rows; matrices below 1024 x 1024 on one worker",
    "twice the matrix, and its rows of eight",
)
TURNS = (
    "one run for the whole iteration: each worker has rows of A, or one all of them",
    "its rows of the vectors that the method keeps, and all rows of one vector (`cg`: two); on one worker all of A",
)
SOLVED_IN_TURNS = *TURNS, "NaN ends the iteration; it is not an error."
PRODUCT = "one run, as a product by `dask_distmm.matmul`, also in waves", "as for `matmul`", _CARRIED
# Names that other functions have, and what stands for them here.
HINTS = {
    **dict.fromkeys(
        ("overwrite_ab", "overwrite_b", "lwork", "lapack_driver", "driver"), "leave it out, it does not change results"
    ),
    "dtype": "convert the operands by astype",
    "chunks": "rechunk the operands or the result",
}
_inside = contextvars.ContextVar("inside", default=False)


def documented(doc: str, options: type | None, cost: Cost) -> str:
    """Return a docstring with the options of runs, errors, the costs, and what happens with NaN."""
    every = RunOptions, SolveOptions, FactorOptions, RefinedOptions, *([options] if options else [])
    stated = {option: text for group in every for option, text in texts_of(group).items()}
    texts = {option: stated[option] for option in hints_of(options)}
    unless = ", unless ``check_finite=False``" * ("check_finite" in texts)
    where, held, nan = (*cost, f"NaN and infinities are a `MatrixError` when it is computed{unless}.")[:3]
    paragraphs = f"Where it runs: {where}.", f"Memory of a worker beside its chunks: {held}.", nan
    listed, behind = inspect.cleandoc(doc).split("\n\nReturns\n", 1)
    returned, title, examples = behind.partition("\nExamples\n")
    raised = "\nRaises\n------\nPlanError\n    When it is called: an argument does not fit, or is not supported.\n"
    if len(cost) == 2:
        raised += f"MatrixError\n    When it is computed: an element is NaN or infinite{unless}.\n"
    notes = "\n\n".join(textwrap.fill(text, 112) for text in paragraphs)
    behind = f"{returned}{'' if 'Raises' in returned else raised}"
    return "\n".join(
        [listed, *texts.values(), "", "Returns", f"{behind}\nNotes\n-----\n{notes}\n{title}{examples}", ""]
    )


def relate(functions: Mapping[str, Any], *groups: str) -> None:
    """Add "See Also" to docstrings: each function names all others of its groups."""
    names: dict[str, list[str]] = {}
    for group in map(str.split, groups):
        for name in group:
            names.setdefault(name, []).extend(x for x in group if x != name)
    for name, related in names.items():
        listed = f"\nSee Also\n--------\n{', '.join(dict.fromkeys(related))}\n\nNotes\n"
        functions[name].__doc__ = (functions[name].__doc__ or "").replace("\nNotes\n", listed, 1)


def hints_of(options: type | None) -> dict[str, Any]:
    """Return the types of options by their names."""
    return {} if options is None else typing.get_type_hints(options)


@contextlib.contextmanager
def named(function: str) -> Iterator[None]:
    """Put the name of the function that the user called before the text of a PlanError."""
    if _inside.get():
        yield
        return
    token = _inside.set(True)
    try:
        yield
    except PlanError as error:
        error.args = (f"{function}(): {error}",)
        raise
    finally:
        _inside.reset(token)


def check_value(name: str, value: Any, allowed: Any) -> None:
    """Refuse a value that an annotation does not allow."""
    kinds = typing.get_args(allowed) if typing.get_origin(allowed) in (types.UnionType, typing.Union) else (allowed,)
    if Array in kinds:
        return  # Functions say what is wrong with an operand.
    if any(_fits(value, kind) for kind in kinds):
        return
    choices = [choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)]
    if isinstance(value, str) and choices and all(isinstance(choice, str) for choice in choices):
        raise PlanError(unknown_name(name, value, choices))
    raise PlanError(f"{name} must be {' or '.join(map(_text, kinds))}, got {reprlib.repr(value)}")


def check_range(least: int, most: float = math.inf, advice: str = "", /, **values: float | None) -> None:
    """Refuse numbers that are not in a range; None stands for a default."""
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            expected = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise PlanError(f"{name} must be {expected}, got {value}{advice}")


# How a kind of values is called, and its classes.
_CLASSES: dict[Any, tuple[str, Any]] = {
    bool: ("True or False", (bool, np.bool)),
    int: ("an integer", numbers.Integral),
    float: ("a number", numbers.Real),
    str: ("a name", str),
    types.NoneType: ("None", types.NoneType),
}


def _fits(value: Any, kind: Any) -> bool:
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    truth = isinstance(value, bool | np.bool)
    if kind is Any or origin is None:
        return kind is Any or (isinstance(value, _CLASSES[kind][1]) and truth == (kind is bool))
    if origin is Literal:
        return not truth and isinstance(value, str | numbers.Integral) and value in arguments
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        return isinstance(value, str) and origin is not tuple
    fixed = origin is tuple and arguments[-1] is not Ellipsis
    each = arguments if fixed else arguments[:1] * len(value)
    return len(value) == len(each) and all(map(_fits, value, each))


def _text(kind: Any) -> str:
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        kind = "values" if Any in arguments else "integers"
        return kind if arguments[-1] is Ellipsis else f"{len(arguments)} {kind}"
    return "addresses" if origin is not None else _CLASSES[kind][0]
