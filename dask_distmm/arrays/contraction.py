"""Contractions of arrays of any number of dimensions, as products of matrices whose axes are several of theirs.

The kept axes of a chunk of A become its rows and the summed ones its columns; of B's the other way around. Elements of
such an axis are in the order of the chunks, and within a chunk in its own: a product takes any order of what it sums
over, as long as A and B have the same, and the chunks of D are taken apart again. So no chunk is cut, and each rank's
part is a GEMM of reshaped chunks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array.core import Array, unify_chunks
from dask.array.einsumfuncs import einsum as dask_einsum
from dask.array.einsumfuncs import parse_einsum_input
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_distmm.arrays.fallback import dask_tensordot
from dask_distmm.arrays.kinds import planning
from dask_distmm.config import minimum_flops

Sizes = tuple[int, ...]
Product = Callable[[Array, Array], Any]


def contract(a: Array, left: str, b: Array, right: str, out: str, product: Product) -> Any:
    """Return the contraction of two arrays whose axes have letters; NotImplemented if it is not a product."""
    batch, rows, cols, summed = _roles(a, left, b, right, out)
    if not summed or not (rows or cols) or np.isnan([*a.shape, *b.shape]).any():
        return NotImplemented
    if batch or len(summed) > 1:
        _, (a, b) = unify_chunks(a, left, b, right, warn=False)
    # An axis of length 1 stands in for none; vectors do without.
    down = [rows] if batch or rows else []
    along = [cols] if batch or cols else []
    if planning() and (batch or max(map(len, (rows, cols, summed))) > 1):
        return NotImplemented
    sizes = dict(zip(left + right, a.chunks + b.chunks, strict=True))
    first, second, third = [*batch, *down, summed], [*batch, summed, *along], [*batch, *down, *along]
    # Each chunk that is reshaped is a task.
    tasks = sum(_count(sizes, *groups) for groups in (first, second, third) if max(map(len, groups)) > 1)
    if minimum_flops() is None and 2 * tasks > _count(sizes, *batch, *down, summed, *along):
        return NotImplemented
    found = product(_merged(a, left, first), _merged(b, right, second))
    if found is NotImplemented:
        return NotImplemented
    return _merged(_apart(found, third, sizes), "".join([*batch, *rows, *cols]), list(out))


def einsum(spec: str, arrays: Sequence[Array], product: Product) -> Any:
    """Return a contraction of arrays, two at a time in the cheapest order; other pairs are left to Dask.

    Of two operands that is NotImplemented.
    """
    terms, out = spec.split("->")
    left = list(zip(terms.split(","), arrays, strict=True))
    path: list[tuple[int, ...]] = [(0, 1)]
    if len(left) > 2:
        shapes = [np.broadcast_to(x.dtype.type(0), x.shape) for x in arrays]
        path = np.einsum_path(spec, *shapes, optimize="optimal" if len(left) < 6 else "greedy")[0][1:]
    for pair in path:
        taken = [left.pop(i) for i in sorted(pair, reverse=True)][::-1]
        needed = {*out, *itertools.chain(*(letters for letters, _ in left))}
        found = dict.fromkeys("".join(one for one, _ in taken))
        letters = "".join(x for x in found if x in needed) if left else out
        made = NotImplemented
        if len(taken) == 2:
            (first, a), (second, b) = taken
            made = contract(a, first, b, second, letters, product)
            if made is NotImplemented:
                made = _by_tensordot(a, first, b, second, letters)
        if made is NotImplemented:
            if len(arrays) == 2:
                return NotImplemented
            made = dask_einsum(",".join(one for one, _ in taken) + "->" + letters, *(x for _, x in taken))
        left.append((letters, made))
    return left[0][1]


def _by_tensordot(a: Array, left: str, b: Array, right: str, out: str) -> Any:
    """Return a contraction of Dask's tasks that call BLAS: chunk by chunk ``einsum`` is much slower."""
    batch, _, _, summed = _roles(a, left, b, right, out)
    if not summed or batch or planning() or np.result_type(a, b).kind not in "fc":
        return NotImplemented
    found = dask_tensordot(a, b, axes=([left.index(x) for x in summed], [right.index(x) for x in summed]))
    return _merged(found, "".join(x for x in left + right if x not in summed), list(out))


def _roles(a: Array, left: str, b: Array, right: str, out: str) -> tuple[str, str, str, str]:
    """Return the axes that are kept of both, of A alone, of B alone, and that are summed over.

    None is summed over where the sum is of another kind, or Dask's own function has an error to raise.
    """
    batch, rows, cols = ("".join(x for x in out if (x in left, x in right) == of) for of in ((1, 1), (1, 0), (0, 1)))
    summed = "".join(x for x in left if x in right and x not in out)
    once = all(len(set(one)) == len(one) for one in (left, right, out))
    # Dask's own function takes a length of 1 for any.
    fit = all(a.shape[left.index(x)] == b.shape[right.index(x)] for x in batch + summed)
    return batch, rows, cols, summed if once and fit and {*left, *right} == {*out, *summed} else ""


def parsed(args: Sequence[Any]) -> tuple[str, list[Array]] | None:
    """Return what ``einsum`` is asked for, without an ellipsis, and its arrays; None if Dask's own has it to refuse."""
    try:
        terms, out, arrays = parse_einsum_input(args)
    except (TypeError, ValueError):
        return None
    spec = re.sub(r"\s", "", f"{terms}->{out}")
    given = [x.ndim if isinstance(x, Array) else -1 for x in arrays]
    named = [len(one) for one in spec.split("->")[0].split(",")]
    return (spec, list(arrays)) if len(given) > 1 and given == named else None


def _merged(x: Array, letters: str, groups: Sequence[str]) -> Array:
    """Return an array with an axis for each group of axes."""
    order = [letters.index(one) for one in itertools.chain(*groups)]
    if all(len(group) == 1 for group in groups):
        # Of a matrix a run sees through it.
        return x if order == sorted(order) else x.T if x.ndim == 2 else x.transpose(order)
    sizes = dict(zip(letters, x.chunks, strict=True))
    name = f"merged-{tokenize(x.name, order, groups)}"
    graph = {}
    for place, merged, _, shape in _blocks(groups, sizes):
        at = tuple(place[order.index(i)] for i in range(x.ndim))
        graph[name, *merged] = Task((name, *merged), _reshaped, TaskRef((x.name, *at)), order, shape)
    return _array(name, graph, x, [tuple(_products(group, sizes)) for group in groups])


def _apart(x: Array, groups: Sequence[str], sizes: Mapping[str, Sizes]) -> Array:
    """Return an array whose axes are those of all groups, of one that has an axis for each."""
    merged = tuple(tuple(_products(group, sizes)) for group in groups)
    x = x if x.chunks == merged else x.rechunk(merged)
    if all(len(group) == 1 for group in groups):
        return x
    name = f"apart-{tokenize(x.name, groups, sizes)}"
    order = list(range(x.ndim))
    graph = {
        (name, *place): Task((name, *place), _reshaped, TaskRef((x.name, *at)), order, shape)
        for place, at, shape, _ in _blocks(groups, sizes)
    }
    return _array(name, graph, x, [sizes[one] for one in itertools.chain(*groups)])


def _count(sizes: Mapping[str, Sizes], *groups: str) -> int:
    return math.prod(len(sizes[one]) for one in itertools.chain(*groups))


def _products(group: str, sizes: Mapping[str, Sizes]) -> Iterator[int]:
    return map(math.prod, itertools.product(*(sizes[one] for one in group)))


def _blocks(groups: Sequence[str], sizes: Mapping[str, Sizes]) -> Iterator[tuple[Sizes, Sizes, Sizes, Sizes]]:
    """Yield the place of each chunk along all axes and along the groups, and its shape in both."""
    each = [list(itertools.product(*(enumerate(sizes[one]) for one in group))) for group in groups]
    for blocks in itertools.product(*map(enumerate, each)):
        flat = [one for _, block in blocks for one in block]
        yield (
            tuple(i for i, _ in flat),
            tuple(number for number, _ in blocks),
            tuple(size for _, size in flat),
            tuple(math.prod(size for _, size in block) for _, block in blocks),
        )


def _reshaped(chunk: Any, order: Sequence[int], shape: Sizes) -> Any:
    return chunk.transpose(order).reshape(shape)


def _array(name: str, graph: dict[Any, Any], x: Array, chunks: Sequence[Sizes]) -> Array:
    made = HighLevelGraph.from_collections(name, graph, dependencies=[x])
    return da.Array(made, name, tuple(chunks), meta=meta_from_array(x._meta, ndim=len(chunks)), dtype=x.dtype)
