"""How Sphinx builds the documentation: `make docs`, and then docs/_build/html/index.html."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tarantella

REPOSITORY = Path(__file__).parents[1]

project = "Tarantella"
author = "The Tarantella authors"
copyright = "The Tarantella authors"  # noqa: A001  # Sphinx's name for it
version = release = tarantella.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Links to files of the repository that are not pages, such as examples, stay links to files.
myst_all_links_external = False
suppress_warnings = ["myst.header"]

# Docstrings use Google style, with code in single backticks, as in Markdown.
default_role = "code"
napoleon_numpy_docstring = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Types and base classes from Keras and TensorFlow have no page here.
nitpick_ignore_regex = [("py:.*", r"(keras|tf|np|tensorflow|numpy|collections|tarantella)\..*")]

html_theme = "furo"
html_title = f"Tarantella {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
# Prompts are not copied with a command.
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

_FENCE = re.compile(r"^( *)```(\w+)$")


def show_fences(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turns a fenced Markdown block in a docstring into a Sphinx code block."""
    inside = False
    shown: list[str] = []
    for line in lines:
        opening = _FENCE.match(line)
        if opening:
            shown += [f"{opening[1]}.. code-block:: {opening[2]}", ""]
            inside = True
        elif inside and line.strip() == "```":
            inside = False
        else:
            shown.append(f"    {line}" if inside and line else line)
    lines[:] = shown


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", show_fences, priority=100)
