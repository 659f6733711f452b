"""Write the table of the package's folders into ``how-it-works.md``.

``python docs/make_folders.py`` replaces the table. The order of the rows is the rule of imports in
``tests/test_structure.py``, the descriptions are the first paragraphs of docstrings, the imports are those of the code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent / "dask_distmm"
PAGE = HERE / "how-it-works.md"
BEGIN, END = "<!-- made by make_folders.py -->\n", "<!-- end of what make_folders.py made -->\n"
# Modules that every Python package has, and the version's number.
LEFT_OUT = {"__init__", "__main__", "_version"}


def order() -> list[str]:
    """Return the names of the package's folders and modules: each may import from those before it."""
    tree = ast.parse((HERE.parent / "tests" / "test_structure.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER":
            return [name for name in ast.literal_eval(node.value) if name not in LEFT_OUT]
    raise ValueError("tests/test_structure.py has no ORDER")


def parts(path: Path) -> Iterator[Path]:
    """Yield a module, or a folder and all packages inside of it."""
    yield path
    if path.is_dir():
        yield from sorted(found.parent for found in path.glob("*/**/__init__.py"))


def description(path: Path) -> str:
    """Return the first paragraph of a docstring as Markdown."""
    module = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


def imported(modules: Iterable[Path]) -> set[str]:
    """Return which of the package's modules are imported, wherever it is done; as names after ``dask_distmm.``."""
    found: set[str] = set()
    for node in (node for path in modules for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name.removeprefix("dask_distmm.") for name in found if name.partition(".")[0] == "dask_distmm"}


def needs(path: Path, places: list[str]) -> list[str]:
    """Return what the modules of a folder import: other folders and modules of the package, in order."""
    inside = path.relative_to(ROOT).parts
    names = imported(path.glob("*.py") if path.is_dir() else [path])
    found = {name.partition(".")[0] for name in names} - {inside[0], path.stem}
    # Folders inside of the same one are named in full.
    near = {part.relative_to(ROOT).as_posix() for part in parts(ROOT / inside[0])} - {inside[0], "/".join(inside)}
    beside = {one for one in near if any(f"{name}.".startswith(f"{one.replace('/', '.')}.") for name in names)}
    beside = {one for one in beside if not any(other.startswith(f"{one}/") for other in beside)}
    # A public name, or the version.
    package = ["dask_distmm"] * bool(found - {*places, "_version"})
    return [name for name in places if name in found] + package + sorted(beside)


def table() -> str:
    """Return the table: a row for each folder, also inside of another one, and for each module outside of folders."""
    places = order()
    rows = ["| folder | description | imports |", "|---|---|---|"]
    for place in places:
        top = ROOT / place if (ROOT / place).is_dir() else ROOT / f"{place}.py"
        for path in parts(top):
            name = path.relative_to(ROOT).as_posix() + "/" * path.is_dir()
            rows.append(f"| `{name}` | {description(path)} | {', '.join(f'`{x}`' for x in needs(path, places))} |")
    return "\n".join(rows) + "\n"


def between(text: str) -> tuple[str, str, str]:
    """Return what a page has before the table, the table, and what it has behind it."""
    before, _, rest = text.partition(BEGIN)
    inside, _, behind = rest.partition(END)
    return before + BEGIN, inside.strip("\n") + "\n", END + behind


if __name__ == "__main__":
    start, _, rest = between(PAGE.read_text())
    PAGE.write_text(f"{start}\n{table()}\n{rest}")
