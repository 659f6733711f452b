"""Sphinx configuration.

``sphinx-build -W --keep-going -n docs docs/_build/html`` builds the site; it needs no network.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dask_distmm import __version__
from dask_distmm.shown import PUBLIC

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "sphinxext"))

project = "dask_distmm"
author = "The dask_distmm developers"
copyright = f"2026, {author}"
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_nb",
    "config_reference",
    "execute_notebooks",
]
exclude_patterns = ["_build", "examples", "sphinxext"]
templates_path = ["templates"]
nitpicky = True
highlight_language = "text"

# Markdown. Headings get the anchors that code hosts give them, so that links work there and here.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Notebooks are stored without outputs and executed here, one after another.
nb_custom_formats = {".ipynb": "execute_notebooks.read"}
nb_execution_mode = "off"
nb_merge_streams = True
# What Dask logs of a busy machine ("event loop was unresponsive") is nothing that a reader needs.
nb_output_stderr = "remove"

# Docstrings. A name in single backticks is a link where it is one of ours, and a parameter's name elsewhere.
default_role = "autolink"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autosummary_generate = True
numpydoc_show_class_members = False

html_theme = "pydata_sphinx_theme"
html_title = "dask_distmm"
html_favicon = "static/logo.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = True
html_sidebars = {"index": [], "changelog": [], "contributing": []}
html_context = {"default_mode": "auto"}
html_theme_options: dict[str, Any] = {
    "logo": {"text": "dask_distmm", "image_light": "static/logo.svg", "image_dark": "static/logo.svg"},
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
}


def skip_internals(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what plans have for the runtime, as completion does; and what scikit-learn adds to its classes."""
    home = getattr(getattr(member, "fget", getattr(member, "func", member)), "__module__", "") or ""
    if what == "class" and home.startswith("sklearn"):
        return True
    return True if what == "class" and home.startswith("dask_distmm.planning") and name not in PUBLIC else None


def setup(app: Any) -> None:
    """Connect what this file adds to Sphinx."""
    app.connect("autodoc-skip-member", skip_internals)
