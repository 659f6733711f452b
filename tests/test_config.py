from __future__ import annotations

import importlib.resources

import dask
import jsonschema
import pytest
import yaml

from dask_distmm.config import DEFAULTS, read_options, setting
from dask_distmm.errors import PlanError
from dask_distmm.planning import METHODS


def shipped(name):
    return yaml.safe_load(importlib.resources.files("dask_distmm").joinpath(name).read_text())


def test_defaults_fit_the_schema():
    schema = shipped("distmm-schema.yaml")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(DEFAULTS, schema)
    assert set(schema["properties"]["distmm"]["properties"]) == set(DEFAULTS["distmm"])
    assert schema["properties"]["distmm"]["properties"]["method"]["enum"] == ["auto", *METHODS]


@pytest.mark.parametrize("wrong", [{"methods": 1}, {"method": "magic"}, {"retries": -1}, {"numpy": {"panels": 1}}])
def test_the_schema_refuses(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"distmm": wrong}, shipped("distmm-schema.yaml"))


def test_units():
    with dask.config.set({"distmm.timeouts.vote": "2m", "distmm.numpy.panel-bytes": "1 kiB"}):
        options = read_options()
    assert options.vote_timeout == 120
    assert options.panel_bytes == 1024


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("timeouts.transfer", "later"),
        ("numpy.panel-bytes", "much"),
        ("numpy.prefetch-panels", 0),
        ("memory.limit-fraction", 1.5),
        ("machine.numpy.gflops", 80),
        ("machine.numpy.bandwidth", True),
        ("machine.numpy.latency", "2 ms"),
    ],
)
def test_errors_name_the_key(key, value):
    with dask.config.set({f"distmm.{key}": value}), pytest.raises(PlanError, match=f"distmm.{key}"):
        read_options()


def test_a_user_sees_the_defaults_in_dasks_config():
    assert dask.config.get("distmm.method") == "auto"
    with dask.config.set({"distmm.method": "summa"}):
        assert setting("method") == "summa"
