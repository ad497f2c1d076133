"""Configuration of the site: `make docs` builds it from the documents of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import fuser  # noqa: E402 (of this checkout)

project = "fuser"
copyright = "the authors of fuser"
version = release = fuser.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",  # in place of myst_parser: it also runs notebooks
    "sphinx_copybutton",
    "sentences",
    "activations",
    "bases",
    "figures",
    "commands",
]
root_doc = "docs/index"
include_patterns = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/dev/*.md",
    "docs/dev/wings/*.md",
    "docs/notebooks/*.md",
    "docs/reference/*",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "examples/README.md",
]
# Folders without documents, of which an environment has ten thousands of files to look at.
exclude_patterns = [".*", "forecast", "fuser", "out", "shared", "tests"]

# Pages of docs/reference name the members that users call or override.
autodoc_default_options = {"show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_google_docstring = False
napoleon_use_rtype = False
default_role = "literal"
highlight_language = "text"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# Pages of docs/notebooks are run at each build, and an error in one ends it.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

html_theme = "furo"
html_title = "fuser"
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
html_static_path = ["static"]
html_extra_path = ["extra"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True
