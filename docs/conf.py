"""The documentation site, for Sphinx: the repository's pages and the docstrings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkdl.settings import __version__

project = "sparkdl"
copyright = "the authors of sparkdl"
release = version = __version__
root_doc = "README"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md"]
exclude_patterns = [".*", "build", "runs", "sparkdl", "tests", "docs/contents.md"]

html_theme = "furo"
html_title = f"sparkdl {version}"
html_extra_path = ["index.html"]  # of the site: it leads to the README
html_copy_source = False
html_show_search_summary = False  # a page from the disk may not read the others
highlight_language = "text"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Sequence": "collections.abc.Sequence"}  # there is a sparkdl.Sequence
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_use_ivar = True


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Append the site's table of contents, which those who read the pages elsewhere do not need.

    The search leaves out what is not for users."""
    if name == "CHANGELOG" or name.startswith("docs/internals/"):
        source[0] = f"---\nnosearch: true\n---\n\n{source[0]}"
    if name == root_doc:
        source[0] += Path(__file__).with_name("contents.md").read_text(encoding="utf-8")
    elif name in ("docs/api/index", "docs/coming/index", "docs/internals/index"):
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n[!i]*\n```\n"


def plain_defaults(app: Any, *words: Any) -> tuple[str, str | None] | None:
    """Write the default of a field that is made anew each time so that a signature can be parsed."""
    signature, returned = words[-2:]
    return signature and (signature.replace("<factory>", "{}"), returned)


def setup(app: Any) -> None:
    """Connect the two functions, as Sphinx asks."""
    app.connect("autodoc-process-signature", plain_defaults)
    app.connect("source-read", add_contents)
