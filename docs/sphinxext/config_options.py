"""The options of ``distmm.yaml`` with what its schema says of them. Pure: knows no Sphinx."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["GENERAL", "Group", "Option", "groups", "markdown", "type_text"]

# Of the options that stand in no group.
GENERAL = "General"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Parameters
    ----------
    key
        Its full name, such as ``distmm.timeouts.vote``.
    type
        What may be given, in words.
    default
        As written in YAML.
    description
        What it does.
    """

    key: str
    type: str
    default: str
    description: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Options under one name, and what is said about all of them."""

    name: str
    description: str
    options: tuple[Option, ...]


def groups(defaults: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Group]:
    """Return all options, those without a group first, the others in the order of the file."""
    values, known = defaults["distmm"], schema["properties"]["distmm"]["properties"]
    inside = [name for name, value in values.items() if isinstance(value, Mapping)]
    general = {name: value for name, value in values.items() if name not in inside}
    found = [Group(GENERAL, "", tuple(_options("distmm", general, {"properties": known})))]
    for name in inside:
        options = tuple(_options(f"distmm.{name}", values[name], known[name]))
        found.append(Group(f"distmm.{name}", _sentence(known[name]), options))
    return found


def _options(prefix: str, values: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Option]:
    for name, value in values.items():
        key = f"{prefix}.{name}"
        own = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        if not isinstance(own, Mapping):
            raise ValueError(f"{key} is in distmm.yaml, and not in its schema")
        if isinstance(value, Mapping) and not _numbers_by_name(own):
            yield from _options(key, value, own)
        elif not own.get("description"):
            raise ValueError(f"{key} has no description in the schema")
        else:
            yield Option(key, type_text(own), _yaml(value), _sentence(own))


def _numbers_by_name(schema: Mapping[str, Any]) -> bool:
    """Whether a mapping is one option, such as the rates of the types, and no group of options."""
    return (
        isinstance(schema.get("additionalProperties"), Mapping) and "properties" not in schema["additionalProperties"]
    )


def type_text(schema: Mapping[str, Any]) -> str:
    """Return in words what a schema allows.

    >>> type_text({"type": "integer", "minimum": 1})
    'integer, at least 1'
    >>> type_text({"enum": ["auto", "summa", None]})
    'auto, summa or null'
    """
    if "enum" in schema:
        return _either([_yaml(value) for value in schema["enum"]])
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = {"string": "text", "object": "numbers by name"}
    text = _either([names.get(kind, kind) for kind in kinds])
    for word, key in (("at least", "minimum"), ("above", "exclusiveMinimum"), ("at most", "maximum")):
        if key in schema:
            text += f", {word} {schema[key]:g}"
    return text


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_yaml(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _sentence(schema: Mapping[str, Any]) -> str:
    return str(schema.get("description", "")).strip()


def markdown(option: Option) -> str:
    """Return an option as MyST."""
    default = f"*{option.type}*, by default `` {option.default} ``"
    return "\n".join(
        [f"```{{confval}} {option.key}", ":no-contents-entry:", "", default, "", option.description, "```", ""]
    )
