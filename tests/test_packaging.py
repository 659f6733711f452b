"""Files for other packagers and hosts say the same as ``pyproject.toml``: versions, requirements, extras."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from dask_distmm import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Packages that have another name on conda-forge.
CONDA = {"dask": "dask-core"}


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def needed():
    """Return the package's requirements, with their names on conda-forge, as name and versions."""
    found = {}
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        found[CONDA.get(requirement.name, requirement.name)] = set(str(requirement.specifier).split(","))
    return found


def split(texts):
    """Return requirements in conda's form as name and versions."""
    matches = [re.match(r"([\w-]+) ?(.*)", text) for text in texts if isinstance(text, str)]
    return {match[1]: set(match[2].split(",")) - {""} for match in matches}


def test_the_recipe_is_for_this_version():
    recipe = read("deploy/recipe.yaml")
    assert recipe["context"]["version"] == __version__
    run = split(recipe["requirements"]["run"])
    assert run.pop("python") == {PROJECT["requires-python"]}
    assert run == needed()
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]


def test_releases_are_named_alike():
    """Below what comes next, the newest release is that of the citation, and of the page that installs it."""
    heads = re.findall(r"^## \[(.+)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == ("Unreleased", "")
    citation = read("CITATION.cff")
    assert heads[1] == (citation["version"], str(citation["date-released"]))
    assert citation["license"] == PROJECT["license"]
    named = re.findall(r"dask_distmm-([\d.]+)-py3-none-any\.whl", (ROOT / "docs" / "install.md").read_text())
    assert named == [citation["version"]]
    # This version is that release, or one on the way to a later one.
    released, this = Version(citation["version"]), Version(__version__)
    assert this == released or (this.is_devrelease and Version(this.base_version) > released)


def test_the_environment_has_the_same_requirements():
    found = split(read("environment.yml")["dependencies"])
    assert {name: versions for name, versions in found.items() if name in needed()}.items() <= needed().items()
    assert {"dask-core", "distributed", "numpy"} <= set(found)


@pytest.mark.parametrize("name", ["environment.yml", "deploy/environment-gpu.yml"])
def test_environments_install_this_clone(name):
    (last,) = [x["pip"] for x in read(name)["dependencies"] if isinstance(x, dict)]
    folder, extras = re.fullmatch(r"([./]+)\[([\w,]+)\]", last[0]).groups()
    assert ((ROOT / name).parent / folder / "pyproject.toml").is_file()
    assert set(extras.split(",")) <= set(EXTRAS)


def test_the_image_and_the_site_install_extras_that_exist():
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    named = re.findall(r"EXTRAS=(\w+)", image + (ROOT / "docs" / "install.md").read_text())
    site = read(".readthedocs.yaml")
    assert len(named) >= 3
    assert {*named, *site["python"]["install"][0]["extra_requirements"]} <= set(EXTRAS)
    assert (ROOT / site["sphinx"]["configuration"]).is_file()


def test_ci_runs_each_version_of_python_that_is_promised():
    promised = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text}
    jobs = read(".github/workflows/ci.yml")["jobs"]
    assert set(jobs["run"]["strategy"]["matrix"]["python"]) == promised
    for job in jobs.values():
        for step in job["steps"]:
            command = step.get("run", "")
            assert not command.startswith(".") or (ROOT / command).is_file()


def test_templates_of_issues_are_forms():
    forms = [read(path.relative_to(ROOT)) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    forms = [form for form in forms if "body" in form]
    assert len(forms) == 2
    for form in forms:
        names = [part["id"] for part in form["body"]]
        assert len(set(names)) == len(names)
        assert all(part["attributes"]["label"] for part in form["body"])
