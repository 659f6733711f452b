"""The documentation: what it prints runs, its plots are those of the recorded results, its links lead somewhere."""

from __future__ import annotations

import copy
import doctest
import importlib
import importlib.resources
import importlib.util
import inspect
import json
import logging
import os
import re
import runpy
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import dask
import dask.array as da
import distributed
import numpy as np
import pytest
import yaml
from run_events import newest_run, runs_after

import dask_distmm
from dask_distmm import errors, linalg
from dask_distmm.config import DEFAULTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PRINTED = [*PAGES, ROOT / "README.md"]
# Code on a page, but for what needs more than there is here and says so (<!-- not run: why --> in the line before);
# and what it prints, if that stands behind it.
FENCE = re.compile(r"^(<!-- not run: .+ -->\n)?```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
FLAGS = doctest.NORMALIZE_WHITESPACE
# Runs that the first programs of a reader make at least: the cost model leaves none of these to Dask's own tasks.
RUNS = {"README.md": 1, "index.md": 1, "start.md": 3}


def load(path):
    """Import a module of the documentation's own."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def run_doctest(test):
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    out = []
    failed, _ = runner.run(test, out=out.append, clear_globs=False)
    assert not failed, "".join(out)


def fences(page):
    """Return the code of a page, the line before it, and what it prints."""
    text = page.read_text()
    return [(match[2], text[: match.start(2)].count("\n"), match[3]) for match in FENCE.finditer(text) if not match[1]]


# Docstrings that have examples; tests below would not notice one that moved.
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "dask_distmm").rglob("*.py")
    if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name):
    tests = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    assert any(test.examples for test in tests)
    for test in tests:
        if test.examples:
            run_doctest(test)


# Public names by where users find them.
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (dask_distmm, linalg, dask_distmm.random, dask_distmm.algorithms, dask_distmm.sklearn)
    for name in module.__all__
    if not name.startswith("__") and not inspect.ismodule(getattr(module, name))
}
# What numpydoc asks for and is not done here: a second paragraph, types of several parameters in one entry, whole
# sentences where the shape of a result says all, texts beside related functions.
NOT_ASKED = {"ES01", "PR03", "PR04", "PR07", "PR08", "RT02", "RT03", "RT04", "RT05", "SA04"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_docstrings_are_complete(name):
    """By numpydoc: sections, their order, all parameters, results, examples and related functions."""
    validate = pytest.importorskip("numpydoc.validate", reason="part of the extra docs, with which .ci/run asks")
    ignored = set(NOT_ASKED)
    if isinstance(PUBLIC[name], type):
        # The parameters of plans, which programs get and do not make, are those of their own class; names of enums.
        ignored |= {"EX01", "PR01"} | ({"SA01"} if issubclass(PUBLIC[name], Exception) else set())
    assert not [error for error in validate.validate(name)["errors"] if error[0] not in ignored]


def test_public_functions_have_all_sections():
    functions = {name: function for name, function in PUBLIC.items() if not isinstance(function, type)}
    assert len(functions) > 70
    for name, function in functions.items():
        titles = re.findall(r"^(\S.*)\n-+$", inspect.getdoc(function), re.MULTILINE)
        assert {"See Also", "Examples"} <= set(titles), name
        assert "Raises" in titles or name.endswith(("enabled", "disable", "dequantize")), name
        for related in re.search(r"^See Also\n-+\n(.*)$", inspect.getdoc(function), re.MULTILINE)[1].split(", "):
            assert {related, f"{name.rpartition('.')[0]}.{related}"} & set(PUBLIC), f"{name}: {related}"


def test_the_page_of_the_api_has_each_public_name_once():
    listed = re.findall(r"^   ([a-zA-Z_.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert {f"dask_distmm.{name}" for name in listed} - {
        "dask_distmm.errors.MissingEngineError",
        "dask_distmm.errors.TracingError",
    } == set(PUBLIC)


def test_completion_on_a_plan_lists_what_is_public():
    x = da.ones((60, 40), chunks=20)
    for plan in (
        dask_distmm.explain(x.T, x, workers=2),
        dask_distmm.explain(x.T, x.astype(object)),
        dask_distmm.explain_grouped([(x.T, x)]),
        dask_distmm.explain(da.stack([x, x]), x.T, workers=2),
        linalg.explain(linalg.qr(x)),
        linalg.explain(linalg.cho_solve(linalg.cho_factor(x.T @ x), x.T)),
    ):
        assert {"method", "seconds", "bytes_moved"} <= set(dir(plan))
        assert len(dir(plan)) < 20
        assert not [name for name in dir(plan) if name.startswith("_")]


@pytest.mark.parametrize(
    "page", [p for p in PRINTED if any(">>>" in code for code, *_ in fences(p))], ids=lambda p: p.name
)
def test_examples_of_pages(page):
    """Without a cluster: plans are for imagined workers."""
    namespace = {}
    for code, line, _ in fences(page):
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
            run_doctest(test)
            namespace |= test.globs


@pytest.fixture
def as_printed(page, inproc_cluster, inproc_client, monkeypatch, tmp_path):
    """The names of a program that begins; ``Client()`` is a client of the tests' cluster."""

    class Client(distributed.Client):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(inproc_cluster)

    monkeypatch.setattr(distributed, "Client", Client)
    monkeypatch.chdir(tmp_path)  # some write files
    configuration, level = copy.deepcopy(dask.config.config), logging.getLogger("dask_distmm").level
    names = {"__name__": "__main__"}
    yield names
    names.clear()
    dask.config.config.clear()
    dask.config.config.update(configuration)
    logging.getLogger("dask_distmm").setLevel(level)


@pytest.mark.parametrize(
    "page", [p for p in PRINTED if any(">>>" not in code for code, *_ in fences(p))], ids=lambda p: p.name
)
def test_code_of_pages(page, as_printed, inproc_client, capsys):
    """Each page is a program; it prints what the page says, and the first ones make runs."""
    before = newest_run(inproc_client)
    for code, line, printed in fences(page):
        if ">>>" not in code:
            capsys.readouterr()
            exec(compile("\n" * line + code, str(page), "exec"), as_printed)
            found = words(capsys.readouterr().out)
            if printed and printed.endswith("  ...\n"):
                assert set(words(printed.removesuffix("  ...\n"))) <= set(found)
            elif printed:
                assert found == words(printed)
    assert runs_after(inproc_client, before) >= RUNS.get(page.name, 0)
    if "client" in as_printed:
        as_printed["client"].close()


def anchors(page):
    """Return the anchors that code hosts and MyST give a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    wrong = []
    elsewhere = [ROOT / "benchmarks" / "README.md", *(ROOT / "benchmarks" / "history").glob("*.md")]
    for page in [*PAGES, *(DOCS / "notebooks").glob("*.md"), *ROOT.glob("*.md"), *elsewhere]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("../../actions/"):  # a page of the code host's
                continue
            found = page.parent / path if path else page
            if anchor and found.suffix == ".md" and anchor not in anchors(found):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
            if not found.exists() and not found.with_suffix(".ipynb").exists():
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert not wrong


def test_the_package_names_addresses_of_pages_that_exist():
    """An installed package has no folder of documentation: messages, docstrings and metadata name addresses."""
    shipped = [path for path in (ROOT / "dask_distmm").rglob("*") if path.suffix in (".py", ".yaml", ".cu")]
    texts = {path: path.read_text() for path in [*shipped, ROOT / "pyproject.toml"]}
    local = r"\b(?:docs|benchmarks)/[\w./-]+\.\w+"
    paths = {path.name: found for path in shipped if (found := re.findall(local, texts[path]))}
    assert not paths
    assert errors.page("epilogs") == f"{errors.DOCS}/epilogs.html"
    address = rf"{re.escape(errors.DOCS)}/([\w./-]*)"
    named = {name.rstrip(".") for text in texts.values() for name in re.findall(address, text)} - {""}
    named |= {f"{name}.html" for text in texts.values() for name in re.findall(r"\bpage\([\"']([^\"']+)[\"']\)", text)}
    assert {"epilogs.html", "configuration.html", "precision.html", "changelog.html"} <= named
    assert not [name for name in named if not (DOCS / name).with_suffix(".md").is_file()]
    assert tomllib.loads(texts[ROOT / "pyproject.toml"])["project"]["urls"]["Documentation"] == f"{errors.DOCS}/"


# What a stranger asks: the page that answers, and words of the answer.
QUESTIONS = {
    "Does the SVD of a tall matrix work, and where does it run?": (
        "linear-algebra",
        r"`svd`, `svdvals` \| one run; tall",
    ),
    "What memory does a worker need for it?": (
        "linear-algebra",
        r"a worker holds|memory of a worker|Memory of a worker",
    ),
    "Can my program become slower?": ("performance", r"(?i)slower"),
    "Does it run on GPUs of AMD?": ("faq", r"AMD"),
    "Does it work with xarray, and what comes back?": ("integrations", r"DataArray"),
    "Can A be larger than the memory of the cluster?": ("larger-than-memory", r"waves"),
    "What happens if a worker dies?": ("reliability", r"killed"),
    "Which chunks should I choose?": ("chunks-and-methods", r"## Which chunks"),
    "Must the package be installed on the workers?": ("install", r"the client, the scheduler and all workers"),
    "What is unpickled where?": ("security", r"unpickle"),
    "Which versions of Dask does it work with?": ("versions", r"2026\.7\.1"),
    "Did my product run collectively?": ("faq", r"## Did my product run collectively"),
    "What does a NaN do?": ("faq", r"## What does a NaN do"),
    "Which argument of scipy.linalg.solve is here?": ("linear-algebra", r"## Names and arguments"),
}


@pytest.mark.parametrize("first", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.stem)
def test_questions_are_answered_within_two_clicks(first):
    def linked(pages):
        targets = {page.parent / name for page in pages for name in re.findall(r"\]\(([\w./-]+\.md)", page.read_text())}
        return {page.resolve() for page in targets if page.exists()}

    near = {page.stem.lower(): page for page in linked([first]) | linked(linked([first]))}
    near["security"] = ROOT / "SECURITY.md" if "security" in near else None  # which the page includes
    wrong = [asked for asked, (page, text) in QUESTIONS.items() if not re.search(text, near[page].read_text())]
    assert not wrong


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_are_stored_without_outputs(path):
    """But for those that are not executed when the site is built."""
    code = code_cells(path)
    assert len(code) > 3
    if path.stem != "gpus":
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert "assert" in "".join(line for cell in code for line in cell["source"])


def test_the_notebook_for_gpus_runs_on_cpus():
    """On small matrices, with NumPy's chunks and workers in this process."""
    pytest.importorskip("matplotlib").use("Agg")
    text = "\n".join("".join(cell["source"]) for cell in code_cells(DOCS / "notebooks" / "gpus.ipynb"))
    workers = 'LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0")'
    for old, new in [
        ("import cupy as cp", "import numpy as cp"),
        ("from dask_cuda import LocalCUDACluster", "from distributed import LocalCluster"),
        ('LocalCUDACluster(protocol="ucx")', workers),
        ('cp.cuda.runtime.getDeviceProperties(0)["name"].decode()', '"none"'),
        ("cp.cuda.Device().synchronize()", "pass"),
        ('to_backend("cupy")', 'to_backend("numpy")'),
        ("N, CHUNK = 16_384, 4_096", "N, CHUNK = 256, 64"),
        ("ROWS = 2_000_000", "ROWS = 16_000"),
    ]:
        assert old in text
        text = text.replace(old, new)
    # Functions that it sends to workers are those of a main program.
    exec(compile(text, "gpus.ipynb", "exec"), {"__name__": "__main__"})


def test_files_that_pages_name_are_there():
    wrong = []
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        names = set(re.findall(r"`((?:\w+/)+[\w-]+\.(?:py|json|md|yaml))`", page.read_text()))
        places = ROOT / "dask_distmm", ROOT, DOCS, DOCS / "examples"
        wrong += [f"{page.name}: {name}" for name in sorted(names) if not any((at / name).is_file() for at in places)]
    assert not wrong


# Options that pages name, by benchmark.
BENCHMARKS: dict[str, set[str]] = {}
for _page in [*PRINTED, ROOT / "benchmarks" / "README.md"]:
    for _name, _arguments in re.findall(r"python -m benchmarks\.([\w.]*\w)((?: [^\n`]*)?)", _page.read_text()):
        BENCHMARKS.setdefault(_name, set()).update(re.findall(r"--[\w-]+", _arguments))


# Prints what each says to --help; they set variables of the environment.
HELP = """
import contextlib, io, json, runpy, sys
found = {}
for name in sys.argv[1:]:
    sys.argv, out = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    found[name] = out.getvalue()
print(json.dumps(found))
"""


def test_benchmarks_have_the_options_that_pages_name():
    done = subprocess.run(
        [sys.executable, "-c", HELP, *sorted(BENCHMARKS)], cwd=ROOT, capture_output=True, text=True, timeout=350,
        check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert len(found) > 12
    missing = {name: wanted - set(re.findall(r"--[\w-]+", found[name])) for name, wanted in BENCHMARKS.items()}
    assert not {name: options for name, options in missing.items() if options}
    assert all("--help" in text for text in found.values())


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda p: p.name)
def test_the_first_program_as_a_script(page, tmp_path):
    """It ends with its result, and without a word about what it leaves behind."""
    (code,) = [code for code, *_ in fences(page) if "Client()" in code]
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, timeout=350, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # 2,000 x 2,000 sums of 2,000 products of numbers between 0 and 1.
    assert 1.9e9 < float(done.stdout.splitlines()[-1]) < 2.8e9
    assert ("A @ B under enable(): a collective run" in done.stdout) == ("explain" in code)
    # No task was lost. A worker of Dask's may miss its scheduler in a heartbeat while both stop, and says so.
    assert not re.search(r"Exception|already computed", done.stderr), done.stderr
    assert not [text for text in done.stderr.split("Traceback")[1:] if "dask_distmm" in text]


def words(text):
    """Return the first two words of each line, without numbers, in any order: estimates may rank ways differently.

    A plan has a line "order" only where Dask happens to have put the chunks so that another order of them moves less.
    """
    named = re.sub(r"\b(local|allgather|reducescatter|allreduce|summa)\b", "METHOD", text)
    lines = [re.sub(r"\S*\d\S*( (us|ms|s)\b)?", "#", line).split()[:2] for line in named.strip().splitlines()]
    return sorted(" ".join(line) for line in lines if line[0] != "order")


@pytest.mark.parametrize("name", ["product", "least_squares", "nearest", "counts", "perceptron", "linear_layer"])
def test_examples_print_what_the_page_says(name, capsys):
    """As main programs, in this process: its workers start soon. `test_the_first_program_as_a_script` is one alone."""
    if name == "linear_layer":
        pytest.importorskip("torch", reason="PyTorch is no requirement; .ci/run installs it at its end")
    section = (DOCS / "examples.md").read_text().partition(f"python docs/examples/{name}.py\n```\n")[2]
    printed = re.match(r"\n```text\n(.*?)```", section, re.DOTALL)[1]
    path = DOCS / "examples" / f"{name}.py"
    # Worker processes that are spawned import it again.
    assert '\nif __name__ == "__main__":\n' in path.read_text()
    runpy.run_path(str(path), run_name="__main__")
    assert words(capsys.readouterr().out) == words(printed)


def test_folders_are_those_of_the_code():
    folders = load(DOCS / "make_folders.py")
    page = (DOCS / "how-it-works.md").read_text()
    # Where this fails a folder, its docstring or its imports have changed since: run docs/make_folders.py.
    assert folders.between(page)[1] == folders.table()


def walk(heading):
    """Return the files that a walk of how-it-works.md names, in order."""
    section = (DOCS / "how-it-works.md").read_text().partition(f"### {heading}\n")[2]
    return re.findall(r"^\d+\. `([^`]+)`", re.split(r"^##", section, flags=re.MULTILINE)[0], re.MULTILINE)


@pytest.mark.parametrize("heading", ["One chunk", "One option"])
def test_walks_name_each_file_once(heading):
    files = walk(heading)
    assert len(files) > 12
    assert len(set(files)) == len(files)
    assert not [name for name in files if not (ROOT / "dask_distmm" / name).is_file()]


@pytest.mark.parametrize("heading", ["One chunk", "One option"])
def test_walks_are_those_of_a_run(heading):
    """A run calls functions of these files, in this order."""
    package, visits = str(ROOT / "dask_distmm") + "/", []

    def visit(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(package) and visits[-1:] != [name]:
            visits.append(name)

    a, b = (da.from_array(np.ones((64, 64)), chunks=16) for _ in "ab")
    slow = {"distmm.dask.task": 1.0}  # seconds a task of Dask's own: the run is taken
    threading.setprofile(visit)
    sys.setprofile(visit)
    try:
        options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
        with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
            a, b = client.persist([a, b])
            distributed.wait([a, b])
            visits.clear()
            if heading == "One chunk":
                with dask.config.set(slow), dask_distmm.enabled():
                    d = a @ b
            else:
                d = dask_distmm.matmul(a, b, method="allreduce")
            np.testing.assert_array_equal(d.compute(), np.full((64, 64), 64.0))
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    left = iter([name.removeprefix(package) for name in visits])
    assert not [name for name in walk(heading) if name not in left]


def test_pictures_are_drawn_by_the_code():
    pictures = load(DOCS / "make_pictures.py")
    names = {path.stem for path in (DOCS / "pictures").glob("*.svg") if not path.stem.startswith("performance-")}
    assert len(names) > 7
    assert all(getattr(pictures, name)().figure.axes for name in sorted(names))


def test_the_gallery_is_drawn_by_the_code():
    gallery, page = load(DOCS / "make_gallery.py"), (DOCS / "algorithms.md").read_text()
    assert set(gallery.PLOTS) == set(dask_distmm.algorithms.__all__)
    for name in gallery.PLOTS:
        assert gallery.drawn(name).axes[0].has_data()
        assert f"(pictures/algorithm-{name}.png)" in page
        assert (DOCS / "pictures" / f"algorithm-{name}.png").stat().st_size < 40_000
        assert f":pyobject: {name}\n" in (DOCS / "gallery.md").read_text()


def test_plots_are_those_of_the_results():
    plots = load(DOCS / "make_plots.py")
    page = (DOCS / "performance.md").read_text()
    for name, plot in plots.PLOTS.items():
        assert plot().axes
        assert f"(pictures/{name}.svg)" in page
        # Where this fails results have changed since: run docs/make_plots.py, and read performance.md again.
        assert plots.digest() in (DOCS / "pictures" / f"{name}.svg").read_text()
    for path in plots.PAGES:
        assert plots.written(path.read_text()) == path.read_text()
        named = set(re.findall(r"<!-- times of (\S+),", path.read_text()))
        expected = {"which-function.md": set(plots.QUESTIONS), "performance.md": named, "projects.md": {"projects"}}
        assert named == expected.get(path.name, {"short"})


@pytest.fixture(scope="module")
def config_options():
    return load(DOCS / "sphinxext" / "config_options.py")


def test_every_option_is_in_the_reference(config_options):
    schema = yaml.safe_load(importlib.resources.files("dask_distmm").joinpath("distmm-schema.yaml").read_text())
    groups = config_options.groups(DEFAULTS, schema)
    assert [group.name for group in groups][:2] == ["General", "distmm.memory"]
    found = [option for group in groups for option in group.options]
    keys = [option.key for option in found]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert dask.config.get(key, "missing") != "missing"

    def leaves(prefix, value):
        if isinstance(value, dict) and prefix not in keys:
            for name, inner in value.items():
                yield from leaves(f"{prefix}.{name}", inner)
        else:
            yield prefix

    assert set(leaves("distmm", DEFAULTS["distmm"])) == set(keys)
    assert all(option.description and option.type and option.default for option in found)
    assert "```{confval} distmm.retries" in config_options.markdown(next(o for o in found if o.key == "distmm.retries"))


def test_an_option_without_description_is_refused(config_options):
    schema = {"properties": {"distmm": {"properties": {"x": {"type": "integer"}}}}}
    with pytest.raises(ValueError, match=r"distmm\.x has no description"):
        config_options.groups({"distmm": {"x": 1}}, schema)
    with pytest.raises(ValueError, match=r"distmm\.y is in distmm.yaml, and not in its schema"):
        config_options.groups({"distmm": {"y": 1}}, schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 1}, "integer, at least 1"),
        ({"type": ["string", "number"]}, "text or number"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number, above 0, at most 1"),
        ({"enum": ["auto", "summa", None]}, "auto, summa or null"),
    ],
)
def test_types_in_words(config_options, schema, text):
    assert config_options.type_text(schema) == text
