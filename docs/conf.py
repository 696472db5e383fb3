"""How Sphinx builds the documentation: `make docs`, and then docs/_build/html/index.html."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from docutils import nodes

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
# Types come from the annotations, or from the docstring where data of many types are taken.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
# Types from elsewhere have no page here, nor have words for types, such as "array".
nitpick_ignore_regex = [
    ("py:.*", r"(keras|tf|np|tensorflow|numpy|collections|os|pathlib|tarantella)\..*"),
    ("py:class", r"array|tensor|generator|DataLoader|number|string|nested structure|\.\.\."),
    ("py:class", r"(list of )?Keras \w+"),
]

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


def show_signature_of_keras(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """`compile` takes the arguments of Keras, whatever they are in this version."""
    if name != "tarantella.Model.compile":
        return None
    parameters = list(inspect.signature(keras.Model.compile).parameters.values())
    return str(inspect.Signature(parameters[1:])), ""  # without `self`


def leave_out_any(app: Any, domain: str, kind: str, content: Any) -> None:
    """The type `Any` tells a reader nothing."""
    for field in list(content.findall(nodes.field)):
        name, body = field.children
        is_any = body.astext() in ("Any", "~typing.Any")
        if is_any and name.astext().split()[0] in ("type", "rtype"):
            field.parent.remove(field)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", show_fences, priority=100)
    app.connect("autodoc-process-signature", show_signature_of_keras)
    app.connect("object-description-transform", leave_out_any, priority=900)  # after autodoc's own
