"""Arrays in files: which name is what, reading in all formats, writing beside and renaming."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from dask_distmm.errors import DistMMError, PlanError
from dask_distmm.tools import multiply as files


def place(path: Path | str) -> files.Place:
    return files.parse_place(str(path))


def make(path: Path, data: np.ndarray) -> None:
    """Write an array in the format of its name, with another library than ours where there is one."""
    if path.suffix == ".npy":
        np.save(path, data)
    elif path.suffix == ".zarr":
        zarr.create_array(str(path), data=data, chunks=(7, 5))
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file.create_dataset("group/data", data=data, chunks=(7, 5))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("text", "kind", "inner"),
    [
        ("a.zarr", "zarr", ""),
        ("a.zarr::x/y", "zarr", "x/y"),
        ("s3://bucket/a.zarr::x", "zarr", "x"),
        ("a.npy", "npy", ""),
        ("a.H5::/d", "hdf5", "d"),
        ("a.hdf5", "hdf5", ""),
    ],
)
def test_names_say_format_and_place(text: str, kind: str, inner: str) -> None:
    found = place(text)
    assert (found.kind, found.inner, str(found)) == (kind, inner, text)
    assert found.remote == ("://" in text)
    assert found.remote or os.path.isabs(found.path)  # workers may have another working directory


@pytest.mark.parametrize("text", ["a", "a.csv", "a.npy::x", "", "::x"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(DistMMError, match="expected X.zarr"):
        place(text)


@pytest.mark.parametrize("suffix", [".zarr", ".npy", ".h5"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_what_is_read_is_what_was_written(tmp_path: Path, suffix: str, dtype: str | None) -> None:
    data = np.random.default_rng().standard_normal((40, 23))
    make(tmp_path / f"x{suffix}", data)
    found = files.read(place(tmp_path / f"x{suffix}"), 2, dtype)
    assert found.npartitions > 1
    assert found.dtype == (dtype or "float64")
    np.testing.assert_array_equal(found.compute(scheduler="threads"), data.astype(dtype or "float64"))
    assert files.read(place(tmp_path / f"x{suffix}"), 2).name != found.name


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from([1, 4, 8, 16]),
    st.data(),
)
def test_chunks_cover_the_array_and_keep_stored_chunks_whole(
    shape: list[int], workers: int, itemsize: int, data: st.DataObject
) -> None:
    stored = data.draw(st.none() | st.tuples(*(st.integers(1, max(1, n)) for n in shape)))
    chunks = files.read_chunks(shape, itemsize, stored, workers)
    assert [sum(axis) for axis in chunks] == shape
    for axis, sizes in enumerate(chunks):
        assert len(set(sizes[:-1])) <= 1
        assert sizes[-1] <= sizes[0]
        if stored is not None:
            assert all(size % stored[axis] == 0 for size in sizes[:-1])


def test_what_can_not_be_read_is_said_in_a_line(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "g.zarr"), mode="w")
    group.create_array("x/a", shape=(4, 4), chunks=(2, 2), dtype="f8")
    np.save(tmp_path / "objects.npy", np.array([{}, 1], object))
    (tmp_path / "broken.npy").write_bytes(b"nonsense")
    for name, reason in (
        ("none.zarr", "there is no store"),
        ("none.npy", "there is no file"),
        ("g.zarr", "this is a group; name one of its arrays: .*g.zarr::x/a$"),
        ("g.zarr::x", "this is a group; name one of its arrays: .*g.zarr::x/a$"),
        ("g.zarr::y", "there is no such array; name one of its arrays: .*g.zarr::x/a$"),
        ("objects.npy", "it holds Python objects, not numbers"),
        ("broken.npy", "is not an .npy file; write"),
    ):
        with pytest.raises(DistMMError, match=reason) as error:
            files.read(place(tmp_path / name), 1)
        assert "\n" not in str(error.value)
    with pytest.raises(DistMMError, match="no such type"):
        files.read(place(tmp_path / "g.zarr::x/a"), 1, "float31")


def fill(client: Client, target: files.Place, path: Path, data: np.ndarray) -> None:
    files.write(client, client.persist(da.from_array(data, chunks=(7, 5))), path, target)


@pytest.mark.parametrize("name", ["x.zarr", "x.zarr::deep/inside", "x.npy", "x.h5", "x.h5::deep/inside"])
def test_a_result_appears_when_it_is_complete_and_replaces_only_if_told(
    inproc_client: Client, tmp_path: Path, name: str
) -> None:
    if ".h5" in name:
        pytest.importorskip("h5py")
    target = place(tmp_path / name)
    data = np.random.default_rng().standard_normal((20, 9))
    with files.staged(target, False) as path:
        fill(inproc_client, target, path, data)
        assert not (tmp_path / name.partition("::")[0]).exists()
    np.testing.assert_array_equal(files.read(target, 1).compute(scheduler="threads"), data)
    with pytest.raises(DistMMError, match="--overwrite replaces it"), files.staged(target, False):
        pass
    with files.staged(target, True) as path:
        fill(inproc_client, target, path, -data)
        np.testing.assert_array_equal(files.read(target, 1).compute(scheduler="threads"), data)
    np.testing.assert_array_equal(files.read(target, 1).compute(scheduler="threads"), -data)
    assert left(tmp_path) == [name.partition("::")[0]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there(
    inproc_client: Client, tmp_path: Path, error: type[BaseException], there: bool
) -> None:
    target = place(tmp_path / "x.zarr")
    data = np.random.default_rng().standard_normal((20, 9))
    if there:
        make(tmp_path / "x.zarr", data)

    def interrupted() -> None:
        with files.staged(target, True) as path:
            fill(inproc_client, target, path, -data)
            raise error

    with pytest.raises(error):
        interrupted()
    assert left(tmp_path) == ["x.zarr"] * there
    if there:
        np.testing.assert_array_equal(zarr.open(str(tmp_path / "x.zarr"), mode="r")[:], data)


@pytest.mark.parametrize("version", [2, 3])
def test_a_group_gets_one_more_array_and_loses_none(inproc_client: Client, tmp_path: Path, version: int) -> None:
    data = np.random.default_rng().standard_normal((20, 9))
    group = zarr.open_group(str(tmp_path / "g.zarr"), mode="w", zarr_format=version)
    group.create_array("a", data=data, chunks=(7, 5))
    target = place(tmp_path / "g.zarr::new/b")
    with files.staged(target, False) as path:
        fill(inproc_client, target, path, 2 * data)
    found = zarr.open_group(str(tmp_path / "g.zarr"), mode="r")
    np.testing.assert_array_equal(found["a"][:], data)
    np.testing.assert_array_equal(found["new/b"][:], 2 * data)
    assert found["new/b"].metadata.zarr_format == version
    assert left(tmp_path) == ["g.zarr"]


def test_what_others_would_lose_is_not_overwritten(tmp_path: Path) -> None:
    zarr.open_group(str(tmp_path / "g.zarr"), mode="w").create_array("a", shape=(2, 2), chunks=(2, 2), dtype="f8")
    make(tmp_path / "x.zarr", np.ones((4, 4)))
    (tmp_path / "folder.zarr").mkdir()
    (tmp_path / "folder.npy").mkdir()
    before = left(tmp_path)
    for name, reason in (
        ("g.zarr", "a group of arrays is there"),
        ("x.zarr::inside", "is an array and can't hold another one"),
        ("folder.zarr", "is not a Zarr store that can be read"),
        ("folder.npy", "it is a folder"),
        ("none/x.npy", "does not exist"),
        ("s3://bucket/x.zarr", "is a URL, where"),
    ):
        target = place(name if "://" in name else tmp_path / name)
        with pytest.raises(DistMMError, match=reason), files.staged(target, True):
            pass
    assert left(tmp_path) == before


def test_a_result_takes_the_place_of_no_input(tmp_path: Path) -> None:
    given = [place(tmp_path / name) for name in ("x.npy", "g.zarr::a", "f.h5::data")] + [place("s3://bucket/y.zarr")]
    zarr.open_group(str(tmp_path / "g.zarr"), mode="w").create_array("a", shape=(2, 2), chunks=(2, 2), dtype="f8")
    for name in ("x.npy", "g.zarr", "g.zarr::a", "g.zarr::a/b", "f.h5"):
        with pytest.raises(PlanError, match="which would be lost"):
            files.check_inputs(place(tmp_path / name), given)
    for name in ("y.npy", "g.zarr::b", "y.zarr"):
        files.check_inputs(place(tmp_path / name), given)


def test_a_part_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    make(tmp_path / "x.zarr", np.random.default_rng().random((20, 20)))
    chunk = tmp_path / "x.zarr" / "c" / "1" / "2"
    chunk.write_bytes(chunk.read_bytes()[:20])
    x = files.read(place(tmp_path / "x.zarr"), 1)
    with pytest.raises(DistMMError, match=r"x.zarr, the part \[7:14, 10:15\] can't be read: .*; write it anew"):
        x.compute(scheduler="sync")
    np.save(tmp_path / "y.npy", np.ones((9, 9)))
    y = files.read(place(tmp_path / "y.npy"), 1)
    (tmp_path / "y.npy").unlink()
    with pytest.raises(DistMMError, match="there is no file"):
        y.compute(scheduler="sync")


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "x.zarr", np.ones((4, 4)))
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.setitem(sys.modules, "h5py", None)
    for name in ("x.zarr", "x.h5"):
        with pytest.raises(DistMMError, match=r"extra 'files', here and on the workers, by .*\[files\]"):
            files.read(place(tmp_path / name), 1)


def test_hdf5_files_with_several_arrays_are_not_overwritten(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["b"] = np.ones((2, 2)), np.zeros((2, 2))
    for name in ("x.h5", "x.h5::a", "x.h5::c"):
        with pytest.raises(DistMMError, match="has the datasets a, b"):
            files.check_target(place(tmp_path / name), True)
    with pytest.raises(DistMMError, match="name one: .*x.h5::a, .*x.h5::b"):
        files.read(place(tmp_path / "x.h5"), 1)


def test_types_that_no_format_has_are_refused() -> None:
    import ml_dtypes

    with pytest.raises(DistMMError, match="bfloat16, which such files don't have"):
        files.check_type(place("x.zarr"), np.dtype(ml_dtypes.bfloat16))
    files.check_type(place("x.npy"), np.dtype(">f4"))
