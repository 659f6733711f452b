from __future__ import annotations

import re
import threading

import dask
import dask.array as da
import dask.array.routines
import numpy as np
import pytest
from conformance import assert_product
from matrices import is_collective

import dask_distmm
from dask_distmm import PlanError

NAMES = [(da, "matmul"), (da, "tensordot"), (dask.array.routines, "matmul"), (dask.array.routines, "tensordot")]


def held():
    return [getattr(module, name) for module, name in NAMES]


def operands():
    rng = np.random.default_rng()
    a, b = rng.standard_normal((40, 30)), rng.standard_normal((30, 20))
    return a, b, da.from_array(a, chunks=9), da.from_array(b, chunks=8)


WAYS = {
    "@": lambda a, b: a @ b,
    "reflected @": lambda a, b: np.asarray(a) @ b,
    "np.matmul": np.matmul,
    "da.matmul": lambda a, b: da.matmul(a, b),
    "da.dot": lambda a, b: da.dot(a, b),
    "Array.dot": lambda a, b: a.dot(b),
    "np.dot": np.dot,
    "da.tensordot": lambda a, b: da.tensordot(a, b, axes=1),
    "np.tensordot": lambda a, b: np.tensordot(a, b, axes=((1,), (0,))),
    "tensordot ints": lambda a, b: da.tensordot(a, b, axes=(1, 0)),
    "tensordot negative": lambda a, b: da.tensordot(a, b, axes=([-1], [-2])),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_multiply(inproc_client, take_all, way):
    a, b, x, y = operands()
    first = a if way == "reflected @" else x
    with dask_distmm.enabled():
        c = WAYS[way](first, y)
        assert is_collective(c)
    assert not is_collective(WAYS[way](first, y))
    assert_product(a, b, c.compute())


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("way", [*WAYS, "einsum"])
def test_shapes_that_do_not_match_have_one_text(request, way, connected):
    """The text of `matmul`, with and without a cluster, where Dask's own function has an error, too."""
    if connected:
        request.getfixturevalue("inproc_client")
    x = da.ones((40, 30), chunks=9)
    call = {**WAYS, "einsum": lambda a, b: da.einsum("ij,jk->ik", a, b)}[way]
    first = np.ones((40, 30)) if way == "reflected @" else x
    with pytest.raises(ValueError, match="Chunks do not add up"):
        call(first, x)
    with dask_distmm.enabled(), pytest.raises(PlanError) as caught:
        call(first, x)
    assert str(caught.value).startswith("shapes (40, 30) and (40, 30) don't match: ")
    assert "must be equal" in str(caught.value)


@pytest.mark.parametrize("way", [*WAYS, "einsum"])
def test_a_length_of_1_stays_what_it_is_in_dask(inproc_client, take_all, way):
    """Where Dask has a result there is no error."""
    x, y = da.ones((40, 1), chunks=9), da.ones((5, 20), chunks=9)
    call = {**WAYS, "einsum": lambda a, b: da.einsum("ij,jk->ik", a, b)}[way]
    first = np.ones((40, 1)) if way == "reflected @" else x
    found = error_or_value(lambda: call(first, y).compute())
    with dask_distmm.enabled():
        assert error_or_value(lambda: call(first, y).compute()) == found


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: da.ones((2, 9, 9)) @ da.ones((3, 9, 9)), "their batch axes (2,) and (3,) must be equal"),
        (lambda: da.einsum("ab,bc,cd->ad", da.ones((2, 3)), da.ones((3, 4)), da.ones((5, 6))),
         "shapes (3, 4) and (5, 6) don't match: axis 1 of operand 1 and axis 0 of operand 2 must be equal"),
        (lambda: da.tensordot(da.ones((2, 3, 4)), da.ones((3, 5)), axes=((1, 2), (0, 1))),
         "axis 2 of operand 0 and axis 1 of operand 1 must be equal"),
        (lambda: da.vdot(da.ones(4), da.ones(5)), "shapes (4,) and (5,) don't match"),
    ],
)  # fmt: skip
def test_axes_that_do_not_match_are_named(make, text):
    with pytest.raises(ValueError):  # noqa: PT011
        make()
    with dask_distmm.enabled(), pytest.raises(PlanError, match=re.escape(text)):
        make()


@pytest.mark.parametrize("axes", [((0,), (0,)), ((1,), (1,)), ((0,), (1,))])
def test_transposed_contractions(inproc_client, take_all, axes):
    a, b, x, y = operands()
    if axes == ((0,), (0,)):
        x, a = x.T, a.T
    elif axes == ((1,), (1,)):
        y, b = y.T, b.T
    else:
        x, y, a, b = x.T, y.T, a.T, b.T
    with dask_distmm.enabled():
        c = da.tensordot(x, y, axes=axes)
    assert is_collective(c)
    np.testing.assert_allclose(c.compute(), np.tensordot(a, b, axes=axes), rtol=1e-10, atol=1e-10)


def test_what_is_not_ours_goes_on_unchanged(inproc_client, take_all):
    _, _, x, y = operands()
    cube = da.ones((3, 40, 30), chunks=10)
    with dask_distmm.enabled():
        for product in (
            da.tensordot(cube, cube, axes=3),
            da.tensordot(x, x, axes=2),
            da.from_array(np.ones((4, 4), object), chunks=2) @ da.ones((4, 4), chunks=2, dtype=object),
            da.ma.masked_greater(x, 0) @ y,
        ):
            assert not is_collective(product)
        with pytest.raises(ValueError, match="Chunks|shape|align"):
            (x @ x).compute()
        with pytest.raises((TypeError, ValueError)):
            x @ 3
        unknown = x[x[:, 0] > 0] @ y
        assert not is_collective(unknown)
        assert unknown.compute().shape[1] == 20


def test_chunks_of_another_type_than_the_array_says(inproc_client, take_all):
    """As zeros of Dask's own Cholesky factors of integers are, and its LU factors of narrow integers."""
    x = np.random.default_rng().integers(0, 9, (60, 60))
    factor = da.linalg.cholesky(da.from_array(x @ x.T + 60 * np.eye(60, dtype=int), chunks=20))
    assert factor.dtype == np.float64
    assert factor.blocks[1, 0].compute().dtype.kind == "i"
    with dask_distmm.enabled():
        product = factor @ factor
    assert is_collective(product)
    u = factor.compute()
    assert_product(u, u, product.compute())

    def said(dtype):
        return da.ones((20, 20), chunks=10).map_blocks(lambda block: block, dtype=dtype, meta=np.empty((0, 0), dtype))

    np.testing.assert_array_equal(
        dask_distmm.matmul(said("f4"), said("f4")).compute(), np.full((20, 20), 20, "f4"), strict=True
    )
    with pytest.raises(dask_distmm.RunFailedError, match="is .* float64; the array says .* int32"):
        dask_distmm.matmul(said("i4"), said("i4")).compute()
    small = np.eye(20, dtype=np.int16)
    with dask_distmm.enabled():
        x = da.linalg.solve(da.from_array(small, chunks=10), da.from_array(small, chunks=10))
        np.testing.assert_array_equal(x.compute(), small)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_chunks_of_a_subclass(inproc_client, take_all, tmp_path):
    """Tasks that read files make memory maps, whose array says nothing of them."""
    x, read = np.random.default_rng().standard_normal((40, 30)), dask.delayed(np.load)
    np.save(tmp_path / "x.npy", x)
    blocks = [da.from_delayed(read(tmp_path / "x.npy", mmap_mode="r"), x.shape, x.dtype) for _ in range(2)]
    mapped, whole = da.concatenate(blocks), np.concatenate([x, x])
    for given in (mapped, mapped.persist(), mapped.map_blocks(np.ma.asarray, meta=np.empty((0, 0)))):
        with dask_distmm.enabled():
            product = given.T @ given
            solved = da.linalg.inv((given.T @ given).map_blocks(np.asmatrix, meta=np.empty((0, 0))))
        assert is_collective(product)
        found = product.compute()
        assert type(found) is np.ndarray
        assert_product(whole.T, whole, found)
        np.testing.assert_allclose(solved.compute() @ whole.T @ whole, np.eye(30), atol=1e-8)
    masked = mapped.map_blocks(np.ma.masked_greater, 0, meta=np.empty((0, 0)))
    with dask_distmm.enabled(), pytest.raises(dask_distmm.RunFailedError, match="MaskedArray.*meta="):
        (masked.T @ masked).compute()


@pytest.mark.filterwarnings("ignore:The `numpy:FutureWarning")
@pytest.mark.parametrize("rows", [2, 30])
def test_factors_of_unknown_sizes_are_dasks(inproc_client, take_all, rows):
    """The shapes of results depend on whether there are fewer rows than columns."""
    rng = np.random.default_rng()
    x, y = (
        da.from_array(rng.standard_normal(shape), chunks=(max(1, rows // 2), 10)[: len(shape)])
        for shape in ((rows, 10), (rows,))
    )
    chosen = da.from_array(np.ones(rows, bool), chunks=rows // 2)

    def made():
        a, b = x[chosen], y[chosen]
        solved = da.linalg.lstsq(a, b)[:2] if rows > 10 else ()
        return [abs(da.linalg.qr(a)[1]), np.linalg.svdvals(a), da.cov(a, rowvar=False), da.corrcoef(a.T), *solved]

    expected = made()
    with dask_distmm.enabled():
        found = made()
    for one, other in zip(dask.compute(*found), dask.compute(*expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-12, strict=True)


def test_masked_chunks_are_dasks():
    x = da.from_array(np.random.default_rng().standard_normal((12, 8)), chunks=4).map_blocks(np.ma.masked_greater, 0)
    spec, given = ("ij,kj->ik", [x, x]) if np.random.default_rng().integers(2) else ("ij,kj,kl->il", [x, x, x])
    expected = da.einsum(spec, *given).compute()
    with dask_distmm.enabled():
        found = da.einsum(spec, *given).compute()
    assert type(found) is type(expected)
    np.testing.assert_allclose(found, expected)


@pytest.mark.filterwarnings("ignore:The `numpy:FutureWarning")
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "int64"])
def test_integers_are_added_as_without(inproc_client, take_all, dtype):
    """Dask's functions add them in 64 bits; NumPy's, which gather arrays of Dask, in their own type."""
    x = (np.random.default_rng().random((20, 20)) < 0.3).astype(dtype)
    y = da.from_array(x, chunks=7)
    for call in (
        lambda: da.tensordot(y, y, axes=1),
        lambda: da.dot(y, y),
        lambda: da.matmul(y, y),
        lambda: np.inner(y, y),
        lambda: np.linalg.tensordot(y, y, axes=1),
        lambda: np.linalg.matmul(y, y),
    ):
        stock = dask.compute(call())[0]
        with dask_distmm.enabled():
            found = call()
        assert (isinstance(found, da.Array) and is_collective(found)) == (dtype == "int64")
        np.testing.assert_array_equal(dask.compute(found)[0], stock, strict=True)
    assert dask_distmm.matmul(y, y).dtype == dtype


@pytest.mark.filterwarnings("ignore:The `numpy:FutureWarning")
def test_numpys_functions_keep_their_errors_and_their_results(inproc_client, take_all):
    x, seconds = da.ones((4, 1), chunks=2), da.from_array(np.ones((0, 1), "m8[s]"), chunks=1)
    calls = (
        lambda: np.inner(x, seconds),
        lambda: np.linalg.multi_dot([x, x[None], x]),
        lambda: np.inner(x, da.ones((4, 2))),
    )
    for call in calls:
        stock = error_or_value(call)
        with dask_distmm.enabled():
            assert error_or_value(call) == stock


def test_mistakes_of_the_configuration_are_errors_of_numpys_functions_too(inproc_client, take_all):
    x = da.ones((20, 20), chunks=10)
    with dask_distmm.enabled(), dask.config.set({"distmm.method": "suma"}):
        for call in (np.inner, np.linalg.matmul):
            with pytest.raises(dask_distmm.PlanError, match="suma"):
                call(x, x)


def error_or_value(call):
    try:
        return call().tolist()
    except Exception as error:
        return type(error), str(error)


def test_too_little_work_is_dasks(inproc_client):
    _, _, x, y = operands()
    with dask_distmm.enabled():
        with dask.config.set({"distmm.minimum-flops": 2 * 40 * 30 * 20}):
            assert is_collective(x @ y)
        with dask.config.set({"distmm.minimum-flops": 2 * 40 * 30 * 20 + 1}):
            assert not is_collective(x @ y)


def test_no_cluster_is_dasks(take_all):
    a, b, x, y = operands()
    with dask_distmm.enabled():
        c = x @ y
        assert not is_collective(c)
        assert_product(a, b, c.compute())


def test_another_scheduler_is_dasks(inproc_client, take_all):
    _, _, x, y = operands()
    with dask_distmm.enabled(), dask.config.set(scheduler="threads"):
        assert not is_collective(x @ y)


def test_disable_restores_exactly():
    before = held()
    dask_distmm.enable()
    first = held()
    assert all(now is not then for now, then in zip(first, before, strict=True))
    dask_distmm.enable()
    assert held() == first
    dask_distmm.disable()
    assert held() == before
    dask_distmm.disable()
    assert held() == before


def test_contexts_nest_and_mix():
    before = held()
    with dask_distmm.enabled():
        with dask_distmm.enabled():
            dask_distmm.disable()
            assert dask_distmm.is_enabled()
        assert dask_distmm.is_enabled()
    assert held() == before
    dask_distmm.enable()
    with dask_distmm.enabled():
        pass
    assert dask_distmm.is_enabled()
    dask_distmm.disable()
    assert held() == before


def test_a_patch_on_top_of_ours_stays(monkeypatch):
    before = da.matmul
    dask_distmm.enable()
    below = da.matmul

    def theirs(a, b):
        return below(a, b)

    da.matmul = theirs
    try:
        dask_distmm.disable()
        assert da.matmul is theirs
        assert_product(np.eye(3), np.eye(3), da.matmul(np.eye(3), np.eye(3)).compute())
    finally:
        da.matmul = before


def test_threads():
    before = held()
    errors = []

    def work() -> None:
        try:
            for _ in range(25):
                with dask_distmm.enabled():
                    assert dask_distmm.is_enabled()
                    assert getattr(da.matmul, "_distmm", False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert held() == before


def test_config_switches_off(inproc_client, take_all):
    _, _, x, y = operands()
    with dask_distmm.enabled(), dask.config.set({"distmm.enabled": False}):
        assert not dask_distmm.is_enabled()
        assert not is_collective(x @ y)
