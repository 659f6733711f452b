from __future__ import annotations

import pickle

import pytest

from dask_distmm import errors


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error") and name != "LinAlgError"])
def test_one_root_and_pickles(name):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.DistMMError)
    arguments = {
        "ProjectedMemoryError": ("text", {"a": 2}, {"a": 1}),
        "RunFailedError": ("text", 7, "voting", {"a": "why"}),
    }.get(name, ("text",))
    error = pickle.loads(pickle.dumps(kind(*arguments)))
    assert type(error) is kind
    assert str(error) == "text"
    assert error.__dict__ == kind(*arguments).__dict__


def test_also_what_python_programs_expect():
    assert issubclass(errors.PlanError, ValueError)
    assert issubclass(errors.ProjectedMemoryError, MemoryError)
    assert issubclass(errors.RunFailedError, RuntimeError)
