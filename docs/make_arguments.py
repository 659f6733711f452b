"""Write the tables of costs, and of arguments beside NumPy's and SciPy's, into ``linear-algebra.md``.

``python docs/make_arguments.py`` replaces the tables. Costs are those that docstrings have. Arguments come from the
signatures of the installed versions, which are named above the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import scipy
import scipy.linalg
import scipy.sparse.linalg

from dask_distmm import linalg

PAGE = Path(__file__).parent / "linear-algebra.md"
BEGIN, END = "<!-- {} made by make_arguments.py -->\n", "<!-- end of {} made by make_arguments.py -->\n"
# The first of these that has a function of a name is the one whose places and defaults it has here.
LIBRARIES = {
    "NumPy": (np.linalg, np),
    "SciPy": (scipy.linalg,),
    "SciPy's sparse.linalg": (scipy.sparse.linalg,),
    "Dask": (da.linalg,),
}
# Options of all runs, which the page explains.
OF_RUNS = {"engine", "workers", "method"}

Parameters = Mapping[str, inspect.Parameter]


def functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions that others have under the same name, or might have."""
    found = {name: getattr(linalg, name) for name in linalg.__all__ if name != "explain"}
    return {name: function for name, function in found.items() if not isinstance(function, type)}


def parameters(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a function by name."""
    return inspect.signature(function).parameters


def namesakes(name: str) -> dict[str, Parameters]:
    """Return the parameters of the functions of this name by library: NumPy's and SciPy's, or only Dask's."""
    found = {
        library: next((getattr(module, name) for module in modules if hasattr(module, name)), None)
        for library, modules in LIBRARIES.items()
    }
    known = {library: parameters(function) for library, function in found.items() if function is not None}
    return {library: known[library] for library in known if library != "Dask" or len(known) == 1}


def by_place(found: Parameters) -> list[str]:
    """Return the names of the arguments that may be passed by place."""
    return [name for name, one in found.items() if one.kind is not inspect.Parameter.KEYWORD_ONLY]


def same(name: str) -> list[str]:
    """Return the arguments that mean here what they mean there; those that are passed by name only as ``name=``."""
    ours, others = parameters(functions()[name]), namesakes(name)
    places = by_place(ours)
    known = set(places[:1]).union(*others.values())
    return [one if one in places else f"{one}=" for one in ours if others and one in known]


def table() -> str:
    """Return the table: a row for each function."""
    rows = [
        f"(NumPy {np.__version__}, SciPy {scipy.__version__}, Dask {dask.__version__})",
        "",
        "| function | places and defaults of | same | only here | not there |",
        "|---|---|---|---|---|",
    ]
    for name in functions():
        ours, others = parameters(functions()[name]), namesakes(name)
        there = same(name)
        alone = [one for one in ours if one not in OF_RUNS and not {one, f"{one}="} & set(there)]
        missing: dict[str, None] = {}
        for found in others.values():
            # The first argument is passed by place.
            missing |= dict.fromkeys(one for one in list(found)[1:] if one not in ours)
        cells = (next(iter(others), ""), *(", ".join(f"`{one}`" for one in some) for some in (there, alone, missing)))
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def costs() -> str:
    """Return the table of costs: a row for the functions that have the same."""
    rows = ["| functions | where they run | memory of a worker beside its chunks |", "|---|---|---|"]
    shared: dict[tuple[str, str], list[str]] = {}
    for name, function in functions().items():
        shared.setdefault(vars(function)["cost"][:2], []).append(f"`{name}`")
    rows += [f"| {', '.join(names)} | {where} | {memory} |" for (where, memory), names in shared.items()]
    return "\n".join(rows) + "\n"


TABLES = {"costs": costs, "arguments": table}


def between(text: str, name: str) -> tuple[str, str, str]:
    """Return what a page has before a table, the table, and what it has behind it."""
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = text.partition(begin)
    inside, _, behind = rest.partition(end)
    return before + begin, inside.strip("\n") + "\n", end + behind


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, make in TABLES.items():
        start, _, rest = between(page, name)
        page = f"{start}\n{make()}\n{rest}"
    PAGE.write_text(page)
