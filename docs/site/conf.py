"""Configuration of the site: `make docs` builds it from the documents of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import fuser

project = "fuser"
copyright = "the authors of fuser"
version = release = fuser.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "myst_parser",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/dev/*.md",
    "docs/reference/*",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "examples/README.md",
]

# What torch's classes and functions link to would need a network.
intersphinx_mapping: dict[str, tuple[str, None]] = {}
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_google_docstring = False
napoleon_use_rtype = False
default_role = "literal"
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "fuser"
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True
