"""Sphinx configuration of the documentation site (`make docs`).

`site_pages.py` writes the sources of the site, `docstrings.py` converts docstrings to reStructuredText. Nothing is
loaded from another host: search is Sphinx's own, and equations are MathML.
"""

import inspect
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

import attent
from docs.docstrings import convert_docstring
from docs.site_pages import get_documented_names, write_pages

project = "attent"
project_copyright = "the authors of attent, Apache-2.0"
version = release = attent.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["**.ipynb_checkpoints"]
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]  # types in signatures; most of them are internal or of other packages
maximum_signature_line_length = 80
smartquotes = False  # flags begin with two hyphens

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4  # as on GitHub
nb_execution_mode = "off"  # notebooks are stored with their outputs
nb_ipywidgets_js: dict[str, Any] = {}

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autoclass_content = "both"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "attent"
html_static_path = [str(Path(__file__).parent / "site.css")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_search_language = "plurals"
html_math_renderer = "mathml"
pygments_style = "tango"
pygments_dark_style = "monokai"


class SearchPlurals(SearchEnglish):
    """English whose only inflection is the plural: Sphinx's stemmer would make "attent" of "attention"."""

    lang = "plurals"
    js_stemmer_rawcode = ""
    js_stemmer_code = r"""
    var Stemmer = function () {
      this.stemWord = (word) => word.toLowerCase().replace(/(..[^s])s$/, "$1");
    }
    """

    def stem(self, word: str) -> str:
        return re.sub(r"(..[^s])s$", r"\1", word.lower())


def setup(app: Sphinx) -> None:
    app.add_search_language(SearchPlurals)
    app.add_html_math_renderer("mathml", (render_inline_math, None), (render_block_math, None))
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir)))
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("doctree-read", replace_dashes)


def render_inline_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def render_block_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def replace_dashes(app: Sphinx, doctree: nodes.document) -> None:
    """Replace what Sphinx writes between a parameter and its explanation."""
    for text in [text for text in doctree.findall(nodes.Text) if text == " -- "]:
        text.parent.replace(text, nodes.Text(": "))


def process_docstring(app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    if kind == "data":  # the docstring of its type
        lines[:] = []
    lines[:] = convert_docstring(lines, value, get_documented_names())


def skip_member(app: Sphinx, kind: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Show methods and properties with a docstring, and `forward` in any case."""
    is_member = inspect.isroutine(member) or isinstance(member, (property, cached_property, type))
    return None if is_member and (name == "forward" or member.__doc__) else True
