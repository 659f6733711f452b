"""Elementwise statements as the text of one kernel for GPUs. Pure.

Each function is an expression of C++ on operands of one type, to which they are converted before, as NumPy does. Values
that several others read are computed once. What has no expression here, as functions of complex numbers, is left to
CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dask_distmm.tracing.form import Kind, Ref, Statement

_TYPES = {
    "float64": "double", "float32": "float", "bool": "bool", "int64": "long long", "int32": "int", "int16": "short",
    "int8": "signed char", "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int",
    "uint64": "unsigned long long",
}  # fmt: skip
# Expressions of operands in the type of the result.
_SAME = {
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "negative": "-{0}", "positive": "{0}",
    "square": "{0} * {0}", "conjugate": "{0}", "copy": "{0}", "astype": "{0}", "real": "{0}",
}  # fmt: skip
# And of floats.
_FLOATS = {
    "divide": "{0} / {1}", "reciprocal": "1 / {0}", "power": "pow({0}, {1})", "hypot": "hypot({0}, {1})",
    "arctan2": "atan2({0}, {1})", "absolute": "fabs({0})", "fabs": "fabs({0})",
    "maximum": "({0} != {0} ? {0} : {1} != {1} ? {1} : {0} > {1} ? {0} : {1})",
    "minimum": "({0} != {0} ? {0} : {1} != {1} ? {1} : {0} < {1} ? {0} : {1})",
    "sign": "({0} != {0} ? {0} : ({0} > 0) - ({0} < 0))",
    **{name: f"{name}({{0}})" for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "cbrt", "sin", "cos", "tan", "sinh", "cosh",
        "tanh", "floor", "ceil", "trunc", "rint",
    )},
    **{f"arc{name}": f"a{name}({{0}})" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
}  # fmt: skip
# Expressions of operands in their common type; the result is a bool.
_COMPARED = {
    "less": "{0} < {1}", "less_equal": "{0} <= {1}", "greater": "{0} > {1}", "greater_equal": "{0} >= {1}",
    "equal": "{0} == {1}", "not_equal": "{0} != {1}", "isnan": "{0} != {0}", "isfinite": "{0} - {0} == 0",
}  # fmt: skip
_BOOLS = {
    "logical_and": "({0} != 0) && ({1} != 0)", "logical_or": "({0} != 0) || ({1} != 0)", "logical_not": "{0} == 0",
}  # fmt: skip
_OF_BOOLS = {"bitwise_and": "{0} && {1}", "bitwise_or": "{0} || {1}", "invert": "!{0}", "bitwise_xor": "{0} != {1}"}


def expression(statement: Statement, kinds: Mapping[int, Kind]) -> tuple[str, str] | None:
    """Return the C++ expression and the operands' type of an elementwise statement; None if it can't be fused."""
    name, result = statement.options["f"], kinds[statement.outputs[0]]
    types = [np.dtype(kinds[x].dtype) if isinstance(x, int) else x.value for x in statement.inputs]
    names = [x.name if isinstance(x, np.dtype) else np.asarray(x).dtype.name for x in types]
    if not _TYPES.keys() >= {*names, result.dtype}:
        return None
    if name in _OF_BOOLS and set(names) == {"bool"}:
        return _OF_BOOLS[name], "bool"
    if name in _COMPARED or name in _BOOLS:
        table = _COMPARED if name in _COMPARED else _BOOLS
        return table[name], np.result_type(*types).name
    if name == "where":
        return "{0} ? {1} : {2}", result.dtype
    if result.dtype == "bool":
        return None
    if name == "clip" and result.dtype.startswith("float"):
        low, high = statement.options["limits"]
        text = "{0}"
        text = f"({text} < {{1}} ? {{1}} : {text})" if low else text
        return (f"({text} > {{{1 + low}}} ? {{{1 + low}}} : {text})" if high else text), result.dtype
    if name in _SAME or (name in _FLOATS and result.dtype.startswith("float")):
        return (_SAME | _FLOATS)[name], result.dtype
    return None


def source(
    statements: Sequence[Statement], kinds: Mapping[int, Kind], outputs: Sequence[int]
) -> tuple[list[int], str, str, str]:
    """Return a kernel's inputs, the text of its input and output parameters, and its body."""
    results = {statement.outputs[0] for statement in statements}
    reads = list(dict.fromkeys(x for statement in statements for x in statement.reads if x not in results))
    lines = []
    for statement in statements:
        (number,) = statement.outputs
        fusible = expression(statement, kinds)
        assert fusible is not None
        text, dtype = fusible
        cast = [
            _operand(ref, dtype if statement.options["f"] != "where" or i else "bool")
            for i, ref in enumerate(statement.inputs)
        ]
        lines.append(f"{_TYPES[kinds[number].dtype]} v{number} = {text.format(*cast)};")
    lines += [f"out{number} = v{number};" for number in outputs]
    given_text = ", ".join(f"{kinds[x].dtype} v{x}" for x in reads)
    made_text = ", ".join(f"{kinds[x].dtype} out{x}" for x in outputs)
    return reads, given_text, made_text, " ".join(lines)


def _operand(ref: Ref, dtype: str) -> str:
    if isinstance(ref, int):
        return f"(({_TYPES[dtype]})v{ref})"
    value = np.dtype(dtype).type(ref.value)
    if dtype.startswith("float"):
        text = {"nan": 'nan("")', "inf": "(1.0 / 0.0)", "-inf": "(-1.0 / 0.0)"}.get(
            repr(float(value)), repr(float(value))
        )
        return f"(({_TYPES[dtype]}){text})"
    return f"(({_TYPES[dtype]}){int(value)})"


def groups(
    statements: Sequence[Statement], kinds: Mapping[int, Kind], kept: set[int]
) -> list[tuple[list[Statement], list[int]] | Statement]:
    """Group elementwise statements into kernels, each with the values that are read later."""
    uses: dict[int, list[Statement]] = {}
    for statement in statements:
        for x in set(statement.reads):
            uses.setdefault(x, []).append(statement)
    fusible = {id(node) for node in statements if node.family == "map" and expression(node, kinds) is not None}
    grouped: list[tuple[list[Statement], list[int]] | Statement] = []
    waiting: list[Statement] = []

    def flush(needed: set[int]) -> None:
        """Emit a kernel for each shape of the needed values, with the pending statements that it depends on."""
        for shape in {kinds[x].shape for statement in waiting for x in statement.outputs if x in needed}:
            targets = [x for statement in waiting for x in statement.outputs if x in needed and kinds[x].shape == shape]
            inside, reads = [], set(targets)
            for statement in reversed(waiting):
                if statement.outputs[0] in reads:
                    inside.append(statement)
                    reads.update(statement.reads)
            grouped.append((inside[::-1], targets))
            for statement in [x for x in waiting if x.outputs[0] in targets]:
                waiting.remove(statement)

    for statement in statements:
        if id(statement) in fusible:
            waiting.append(statement)
            continue
        flush(set(statement.reads))
        grouped.append(statement)
    flush(kept)
    return grouped
