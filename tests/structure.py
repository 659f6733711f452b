"""How large the package is: ``python -m tests.structure`` prints it, ``--write`` records it for `test_structure.py`."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "dask_distmm"
RECORD = Path(__file__).with_suffix(".json")
# A change may add this share to what was recorded.
GROWTH = 0.02


def code_lines(text: str) -> int:
    """Return the number of lines that are not docstrings, comments, imports or blank."""
    lines = dict(enumerate(text.splitlines(), 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        left_out = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if documented and ast.get_docstring(node) is not None:
            left_out.append(node.body[0])
        for statement in left_out:
            for number in range(statement.lineno, statement.end_lineno + 1):
                lines.pop(number, None)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines.values())


def measured() -> dict[str, int]:
    """Return the lines of code, all lines, the modules and the classes of the package."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    return {
        "lines of code": sum(map(code_lines, texts)),
        "lines": sum(text.count("\n") for text in texts),
        "modules": len(texts),
        "classes": sum(isinstance(node, ast.ClassDef) for text in texts for node in ast.walk(ast.parse(text))),
    }


if __name__ == "__main__":
    for what, count in measured().items():
        print(f"{count:7,} {what}")
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps(measured(), indent=1) + "\n")
