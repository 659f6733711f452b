"""Draw the pictures of ``gallery.md`` and ``algorithms.md``.

``python docs/make_gallery.py`` writes ``docs/pictures/algorithm-*.png``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dask_distmm import algorithms

PICTURES = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
COLORS = np.array([BLUE, ORANGE, "#009E73", "#CC79A7"])


def blobs(rng: np.random.Generator) -> np.ndarray:
    """Return points around four places."""
    places = np.array([[0, 0], [5, 1], [2, 5], [7, 6]])
    return places[rng.integers(0, 4, 400)] + rng.standard_normal((400, 2)) * [1.0, 0.7]


def kmeans(ax: Axes, rng: np.random.Generator) -> None:
    """Draw clusters and their centres."""
    X = blobs(rng)
    found = algorithms.kmeans(X, 4)
    ax.scatter(*X.T, s=4, c=COLORS[found.labels])
    ax.plot(*found.centers.T, "kX", ms=9)


def gmm(ax: Axes, rng: np.random.Generator) -> None:
    """Draw the ellipses of a mixture at one and two standard deviations."""
    X = blobs(rng) @ np.array([[1, 0.5], [-0.4, 1]])
    found = algorithms.gmm(X, 4)
    ax.scatter(*X.T, s=4, c=COLORS[found.labels])
    turn = np.linspace(0, 2 * np.pi, 100)
    for mean, covariance in zip(found.means, found.covariances, strict=True):
        for size in (1, 2):
            ax.plot(*(mean[:, None] + size * np.linalg.cholesky(covariance) @ [np.cos(turn), np.sin(turn)]), "k", lw=1)


def nmf(ax: Axes, rng: np.random.Generator) -> None:
    """Draw the parts that pictures of bars consist of."""
    columns = np.eye(8)[::2].repeat(8, 0).reshape(4, 8, 8)
    shapes = np.concatenate([columns, columns.transpose(0, 2, 1)]).reshape(8, 64)
    X = (rng.random((500, 8)) < 0.3) @ shapes + 0.02 * rng.random((500, 64))
    H = algorithms.nmf(X, 8, init="random", max_iter=500, seed=3).H
    H = (H / H.max(1)[:, None]).reshape(2, 4, 8, 8)
    framed = np.pad(H, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=0.5)
    ax.imshow(framed.transpose(0, 2, 1, 3).reshape(20, 40), cmap="Blues")
    ax.set_axis_off()


def als(ax: Axes, rng: np.random.Generator) -> None:
    """Draw a matrix with elements that are not known, and what it is completed to."""
    t = np.linspace(0, 3, 30)
    X = np.outer(np.sin(t), np.cos(2 * t)) + np.outer(t / 3, np.sin(t))
    known = (rng.random(X.shape) < 0.4) * 1.0
    found = algorithms.als(X, 2, weights=known, reg=1e-2, max_iter=500, tol=1e-8)
    holes = np.where(known > 0, X, np.nan)
    ax.imshow(np.hstack([holes, np.full((30, 3), np.nan), found.W @ found.H]), cmap="cividis", vmin=-1, vmax=1)
    ax.set_axis_off()


def logistic_regression(ax: Axes, rng: np.random.Generator) -> None:
    """Draw probabilities of three classes."""
    X = blobs(rng)
    X, y = X[X[:, 1] < 8], ((X[:, 0] > 3.5) * 1 + (X[:, 1] > 3.5))[X[:, 1] < 8]
    found = algorithms.logistic_regression(X, y, n_classes=3, C=10)
    grid = np.stack(np.meshgrid(np.linspace(-3, 10, 80), np.linspace(-3, 8, 80)), -1)
    classes = (grid @ found.coef + found.intercept).argmax(-1)
    ax.contourf(grid[..., 0], grid[..., 1], classes, levels=[-0.5, 0.5, 1.5, 2.5], colors=COLORS[:3], alpha=0.3)
    ax.scatter(*X.T, s=4, c=COLORS[y])


def poisson_regression(ax: Axes, rng: np.random.Generator) -> None:
    """Draw counts and their fitted means."""
    x = np.sort(rng.uniform(-2, 2, 150))
    y = rng.poisson(np.exp(1 + 0.8 * x))
    found = algorithms.poisson_regression(x[:, None], y, alpha=1e-3)
    ax.plot(x, y, ".", color=GREY, ms=4)
    ax.plot(x, np.exp(found.coef[0] * x + found.intercept), color=BLUE)


def lasso(ax: Axes, rng: np.random.Generator) -> None:
    """Draw coefficients by the penalty."""
    X = rng.standard_normal((200, 8))
    y = X @ [3, -2, 1, 0.5, 0, 0, 0, 0] + rng.standard_normal(200)
    penalties = np.geomspace(0.02, 4, 25)
    ax.semilogx(penalties, [algorithms.lasso(X, y, alpha=float(alpha), tol=1e-8).coef for alpha in penalties])
    ax.set_xlabel("alpha", size=8)


def ridge_cv(ax: Axes, rng: np.random.Generator) -> None:
    """Draw scores by the penalty, and the best one."""
    X = rng.standard_normal((60, 30))
    y = X[:, :3].sum(1) + 3 * rng.standard_normal(60)
    penalties = np.geomspace(0.1, 1e4, 40)
    found = algorithms.ridge_cv(X, y, penalties)
    ax.semilogx(penalties, found.scores, color=BLUE)
    ax.plot(found.alpha, found.scores.max(), "o", color=ORANGE)
    ax.set_xlabel("alpha", size=8)


def pagerank(ax: Axes, rng: np.random.Generator) -> None:
    """Draw a graph with nodes as large as their ranks."""
    places = rng.random((14, 2))
    distance = np.linalg.norm(places[:, None] - places, axis=2)
    A = (distance < 0.35) * (rng.random((14, 14)) < 0.6) * (distance > 0)
    A[:, 0] |= (rng.random(14) < 0.4) & (np.arange(14) > 0)
    ranks = algorithms.pagerank(A).ranks
    for i, j in zip(*np.nonzero(A), strict=True):
        ax.annotate("", places[j], places[i], arrowprops={"arrowstyle": "->", "color": GREY, "lw": 0.7})
    ax.scatter(*places.T, s=3000 * ranks, c=BLUE, zorder=3)
    ax.margins(0.15)
    ax.set_axis_off()


def eigs(ax: Axes, rng: np.random.Generator) -> None:
    """Draw all eigenvalues, and those of largest real part."""
    A = rng.standard_normal((120, 120)) / np.sqrt(120)
    w = np.linalg.eigvals(A)
    found = algorithms.eigs(A, 8, which="LR").w
    ax.plot(w.real, w.imag, ".", color=GREY, ms=4)
    ax.plot(found.real, found.imag, "o", mfc="none", color=BLUE)
    ax.set_aspect("equal")


def svds(ax: Axes, rng: np.random.Generator) -> None:
    """Draw singular values, and the largest ones."""
    A = rng.standard_normal((100, 60)) * np.geomspace(1, 0.05, 60)
    ax.semilogy(np.linalg.svd(A, compute_uv=False), ".", color=GREY, ms=4)
    ax.semilogy(algorithms.svds(A, 8).s[::-1], "o", mfc="none", color=BLUE)


PLOTS: dict[str, Callable[[Axes, np.random.Generator], None]] = {
    plot.__name__: plot
    for plot in (kmeans, gmm, nmf, als, logistic_regression, poisson_regression, lasso, ridge_cv, pagerank, eigs, svds)
}


def drawn(name: str) -> Figure:
    """Return the plot of an algorithm."""
    figure = Figure(figsize=(3, 2.1), layout="constrained")
    ax = figure.subplots()
    PLOTS[name](ax, np.random.default_rng(7))
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=7)
    return figure


if __name__ == "__main__":
    for name in PLOTS:
        drawn(name).savefig(PICTURES / f"algorithm-{name}.png", dpi=100, metadata={"Software": None})
