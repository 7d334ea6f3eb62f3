"""Settings of the documentation."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "_extensions"))

project = "dynamo-moe"
author = "The dynamo-moe authors"
copyright = author
release = version = installed_version("dynamo-moe")

# Everything is rendered at build time from local files: neither the build nor the pages need a
# network. Therefore no intersphinx, and formulas are text, not MathJax.
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "command_line",
    "onnx_operator",
    "option_table",
]
exclude_patterns = ["_build"]
nitpicky = True
# Attributes named `bytes` clash with the type `bytes`.
suppress_warnings = ["ref.python"]
# Sphinx only knows the objects that these pages describe.
nitpick_ignore_regex = [(r"py:.*", r"(?!custom_ops|dynamo_moe).*")]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Describe a dataclass's attributes once, as attributes.
autodoc_typehints_description_target = "documented_params"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "dynamo-moe"
copybutton_exclude = ".linenos, .gp, .go"
