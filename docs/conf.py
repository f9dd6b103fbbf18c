"""Sphinx's settings for the documentation site, which `./inv docs` builds into build/docs.

The source folder is the repository itself, so that relative links between pages, examples and the files beside them
mean the same on the site as on a page of the repository.
"""

import ast
import os
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["COLUMNS"] = "96"  # the width of the commands' help texts

import skyfab
from skyfab.cli.parser import CommandParser
from skyfab.cli.tasks import COMMANDS

project = "skyfab"
author = "skyfab contributors"
copyright = author
release = version = skyfab.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".py": "example"}
include_patterns = [
    "docs/**.md",
    "examples/**.py",
    "examples/**.md",
    "tests/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "dist", "skyfab", "tools", "vagrant", "benchmarks", "tests/*/**"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False  # `--hosts` must stay as it is
default_role = "code"  # docstrings have single backticks around code
copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_type_comments = False
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "skyfab"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


class ExampleParser(MystParser):
    """Reads an example as a page: its docstring, how it is started, its source."""

    supported = ("example",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        path = Path(document["source"]).relative_to(ROOT)
        super().parse(page_of_example(path, inputstring), document)


def page_of_example(path: Path, source: str) -> str:
    """An example as Markdown. The docstring's first line is its title, and after a colon the command that starts it."""
    tree = ast.parse(source)
    first, _, rest = (ast.get_docstring(tree) or "").partition("\n")
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno or 0 :]).strip("\n")
    title, colon, command = first.partition(": python ")
    up = "../" * (len(path.parts) - 1)
    lines = [f"# {title.rstrip('.')}", "", rest.strip("\n"), ""]
    if colon:
        lines += ["```console", f"$ python {command}", "```", ""]
    lines += [f"`{path}`:", "", "```python", code, "```", ""]
    guides = [f"[]({up}docs/{page.name})" for page in guides_to(path)]
    return "\n".join([*lines, f"Guide: {', '.join(guides)}. [All examples]({up}docs/examples.md)"])


def guides_to(example: Path) -> list[Path]:
    """The pages that name an example."""
    return [page for page in sorted((ROOT / "docs").glob("*.md")) if str(example) in page.read_text()]


class Commands(Directive):
    """A section for each command, with its own help text."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for name, command in COMMANDS.items():
            section = nodes.section(names=[name], ids=[name.replace(".", "-")])
            text = CommandParser(command).format_help()
            section += [nodes.title(text=f"skyfab {name}"), nodes.literal_block(text, text, language="none")]
            sections.append(section)
        return sections


def shorten(
    app: Sphinx, what: str, name: str, value: object, options: object, arguments: str | None, result: str | None
):
    """A default that is made for each object has no text of its own, and the one of dataclasses is not Python."""
    return (arguments or "").replace("<factory>", "...") or arguments, result


def write_entry(app: Sphinx, error: Exception | None) -> None:
    """The site's folder opens at its first page."""
    if error is None:
        (Path(app.outdir) / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n')


def setup(app: Sphinx) -> None:
    app.add_source_parser(ExampleParser)
    app.add_directive("commands", Commands)
    app.connect("autodoc-process-signature", shorten)
    app.connect("build-finished", write_entry)
