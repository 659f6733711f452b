"""``{config-reference}``: all options with type, default and meaning, out of ``distmm.yaml`` and its schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from config_options import Group, groups, markdown
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import dask_distmm
from dask_distmm.config import DEFAULTS

PACKAGE = Path(dask_distmm.__file__).parent
SCHEMA = PACKAGE / "distmm-schema.yaml"


class ConfigReference(SphinxDirective):
    """The directive: a section for each group."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        for file in (SCHEMA, PACKAGE / "distmm.yaml"):
            self.env.note_dependency(str(file))
        return [self._section(group) for group in groups(DEFAULTS, yaml.safe_load(SCHEMA.read_text()))]

    def _section(self, group: Group) -> nodes.section:
        section = nodes.section(ids=[nodes.make_id(group.name)], names=[group.name.lower()])
        section += nodes.title(group.name, group.name)
        self.state.document.note_explicit_target(section)
        text = "\n".join([group.description, "", *map(markdown, group.options)])
        section += self.parse_text_to_nodes(text)
        return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("config-reference", ConfigReference)
    return {"parallel_read_safe": True}
