"""What is measured: products, types, peers and their variants. Knows no engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Each of these has variants of its own; those of the cluster's peers are their chunks.
VARIANTS = {
    "cublas": ("rows", "columns", "depth"),
    "nvmath": ("all-gather", "all-gather, symmetric B", "reduce-scatter", "reduce-scatter, D by rows"),
    "torch": ("all-gather", "reduce-scatter"),
    "jax": ("rows x columns",),
}
# dask_distmm as it chooses, with either of its GPU engines, and stock Dask.
ENGINES = {"distmm": "auto", "peer": "peer", "cublasmp": "cublasmp"}
CLUSTER = (*ENGINES, "dask")
PEERS = (*VARIANTS, *CLUSTER)
SLABS = "1 chunk a GPU"
# Stock Dask makes g^3 products of a grid of g x g chunks.
_FEW_FROM, _FEW = 16, 2

Chunks = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """A product of an (m, k) matrix and a (k, n) one; with `gram` the first is the transpose of the second."""

    name: str
    m: int
    n: int
    k: int
    gram: bool = False


@dataclass(frozen=True)
class Case:
    """One thing to measure: a product of some type by some peer in some way.

    Attributes
    ----------
    peer, variant
        By whom, and how.
    dtype
        Name of the type of both factors.
    shape
        The product.
    repeat
        Timings that count, after one that does not.
    deadline
        Repetitions that would not end before this time (`time.time`) are left out, where a peer can tell.
    method, workers
        How dask_distmm multiplies, on how many workers (0: all).
    """

    peer: str
    variant: str
    dtype: str
    shape: Shape
    repeat: int
    deadline: float = float("inf")
    method: str = "auto"
    workers: int = 0

    @property
    def label(self) -> str:
        """The variant, with what else was asked for."""
        asked = [self.variant, *([self.method] if self.method != "auto" else [])]
        return ", ".join([*asked, *([f"{self.workers} GPUs"] if self.workers else [])])

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole product."""
        return 2.0 * self.shape.m * self.shape.n * self.shape.k


TALL = (
    Shape("gram 4Mi x 512", 512, 512, 4 * 2**20, gram=True),
    Shape("wide 4096 x 65536", 4096, 4096, 65536),
)


def square(size: int) -> Shape:
    """Return the product of two square matrices."""
    return Shape(f"N={size}", size, size, size)


def cases(
    peer: str, dtypes: Sequence[str], sizes: Sequence[int], grids: Sequence[int], repeat: int, *, tall: bool
) -> Iterator[Case]:
    """Yield all cases of a peer; the tall ones in float64 only."""
    variants = VARIANTS.get(peer)
    if variants is None:
        variants = tuple(f"{g}x{g}" for g in grids)
        variants = (SLABS, *variants) if peer in ENGINES else variants
    products = [(dtype, square(size)) for dtype in dtypes for size in sizes]
    products += [("float64", shape) for shape in TALL] if tall else []
    for (dtype, shape), variant in itertools.product(products, variants):
        if peer == "jax" and shape.gram:
            continue  # rows of X would need an all-reduce, for which XLA might use NVLink multicast
        few = peer == "dask" and int(variant.split("x")[0]) >= _FEW_FROM
        yield Case(peer, variant, dtype, shape, min(repeat, _FEW) if few else repeat)


SWEPT = (
    *(square(size) for size in (2048, 4096, 8192, 16384)),
    Shape("odd 10007", 10007, 10007, 10007),
    Shape("tall 131072 x 1024 x 1024", 131072, 1024, 1024),
    Shape("wide 2048 x 131072 x 2048", 2048, 2048, 131072),
    Shape("flat 1024 x 16384 x 16384", 1024, 16384, 16384),
    Shape("outer 16384 x 16384 x 1024", 16384, 16384, 1024),
)
METHODS = ("allgather", "summa", "reducescatter", "local")


def methods_on(count: int) -> list[str]:
    """Return the methods that differ on some number of GPUs."""
    return [method for method in METHODS if method != "summa" or count >= 4]


def sweep(
    dtypes: Sequence[str], grids: Sequence[int], counts: Sequence[int], repeat: int, names: Sequence[str] = ("",)
) -> Iterator[Case]:
    """Yield each product on several grids and numbers of GPUs, as `auto` chooses and by each engine and method.

    Of the products those whose names begin as one of `names` does.
    """
    shapes = [shape for shape in SWEPT if shape.name.startswith(tuple(names))]
    for dtype, shape, count in itertools.product(dtypes, shapes, counts):
        for variant in (SLABS, *(f"{g}x{g}" for g in grids)):
            yield Case("distmm", variant, dtype, shape, repeat, workers=count)
            for peer, method in itertools.product(("peer", "cublasmp"), methods_on(count)):
                yield Case(peer, variant, dtype, shape, repeat, method=method, workers=count)


# Strong scaling, and weak scaling at 4 x 10^9 elements an operand per 4 GPUs, in multiples of 256.
STRONG = square(32768)
_WEAK_ELEMENTS, _WEAK_STEP = 1e9, 256


def weak(count: int) -> Shape:
    """Return the square product of weak scaling on some number of GPUs."""
    return square(round((_WEAK_ELEMENTS * count) ** 0.5 / _WEAK_STEP) * _WEAK_STEP)


def scaling(peer: str, dtypes: Sequence[str], count: int, repeat: int) -> Iterator[Case]:
    """Yield strong and weak scaling of a peer on some number of GPUs; an engine by each of its methods."""
    alone = count == 1
    if peer == "dask" or (alone and peer not in ("cublas", *ENGINES)):
        return
    variants = (VARIANTS[peer][0],) if alone and peer == "cublas" else VARIANTS.get(peer, (SLABS,))
    methods = ["auto"]
    if peer in ("peer", "cublasmp") and not alone:
        # On one GPU: all would have to go there, and the others would wait.
        methods = [method for method in methods_on(count) if method != "local"]
    for dtype, shape, variant, method in itertools.product(dtypes, (STRONG, weak(count)), variants, methods):
        times = min(repeat, _FEW) if dtype == "float64" else repeat  # which takes seconds
        yield Case(peer, variant, dtype, shape, times, method=method, workers=count)


def split(length: int, parts: int) -> tuple[int, ...]:
    """Cut a length into nearly equal parts, the longer ones first; none is empty."""
    least, more = divmod(length, parts)
    return tuple(size for size in [least + 1] * more + [least] * (parts - more) if size)


def chunks(case: Case, gpus: int) -> tuple[Chunks, Chunks]:
    """Return the chunks of A and B on a cluster; for a Gram product those of X twice."""
    gpus = case.workers or gpus
    shape, (m, n, k) = case.shape, (case.shape.m, case.shape.n, case.shape.k)
    slabs = case.variant == SLABS
    g = 0 if slabs else int(case.variant.split("x")[0])
    if shape.gram:
        x = (split(k, gpus if slabs else g * g), (m,))
        return x, x
    if not slabs:
        return (split(m, g), split(k, g)), (split(k, g), split(n, g))
    if k > max(m, n):
        return ((m,), split(k, gpus)), (split(k, gpus), (n,))
    return (split(m, gpus), (k,)), ((k,), split(n, gpus))
