"""The documentation site: every page is in its navigation, every example has a guide, and what pages show is so.

The site itself is built by `./inv docs`, which CI runs; here is what can be said without Sphinx.
"""

from __future__ import annotations

import ast
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import skyfab
from benchmarks import chart
from skyfab.protocol import messages as protocol_messages
from tools import pictures
from tools.terminal_svg import Frame, Recording, Run

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"


def navigation() -> list[str]:
    """The entries of all toctrees, as paths from the checkout, without suffix; some are patterns."""
    entries = []
    for page in sorted(DOCS.rglob("*.md")):
        for tree in re.findall(r"^:::\{toctree\}\n(.*?)^:::$", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line for line in tree.splitlines() if line and not line.startswith(":")]
            entries += [str((page.parent / line).resolve().relative_to(ROOT)) for line in lines]
    return entries


def test_every_page_and_example_is_in_the_navigation() -> None:
    pages = [*DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    found = [str(page.relative_to(ROOT).with_suffix("")) for page in pages]
    entries = navigation()
    assert [page for page in found if page != "docs/index" and not any(fnmatchcase(page, one) for one in entries)] == []


def test_what_the_navigation_names_is_there() -> None:
    named = [entry for entry in navigation() if "*" not in entry]
    assert [entry for entry in named if not (ROOT / f"{entry}.md").exists()] == []


def test_every_example_has_a_guide() -> None:
    """A page names it."""
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    examples = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").rglob("*.py"))]
    assert [example for example in examples if example not in text] == []


def test_the_table_of_messages_has_every_message() -> None:
    text = (DOCS / "how_it_works.md").read_text().partition("\n### Messages\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| ([A-Z]\w+) \|", text, re.MULTILINE)) == {
        kind.__name__
        for kind in vars(protocol_messages).values()
        if isinstance(kind, type) and issubclass(kind, protocol_messages.Message)
    } - {"Message"}


def test_files_that_how_it_works_names_exist() -> None:
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)+\.(?:py|sh))`", (DOCS / "how_it_works.md").read_text()))
    assert sorted(name for name in named if not (ROOT / "skyfab" / name).exists() and not (ROOT / name).exists()) == []


def test_the_page_for_developers_has_a_row_for_every_package_and_names_files_that_exist() -> None:
    text = (DOCS / "development.md").read_text()
    packages = {f"skyfab/{path.parent.name}/" for path in (ROOT / "skyfab").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(skyfab/\w+/)` \|", text, re.MULTILINE))
    named = set(re.findall(r"`((?:skyfab|tests|tools|benchmarks|docs|\.github|\.ci)/[\w./-]*)`", text))
    assert not [name for name in named if "NAME" not in name and not (ROOT / name).exists()]


def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    documented = re.findall(r"^\.\. auto\w+:: skyfab\.(\w+)", text, re.MULTILINE)
    assert sorted(set(skyfab.__all__) - set(documented)) == []
    assert [name for name in documented if documented.count(name) > 1 and name != "plugins"] == []


# ---- troubleshooting


def messages() -> list[str]:
    """The first column of the tables of messages."""
    page = (DOCS / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [row.split("`")[1] for table in tables for row in table.splitlines()]


def literals(path: Path) -> list[str]:
    """The strings of a module; of an f-string, the parts between its values."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


LITERALS = [
    *(literals(path) for path in (ROOT / "skyfab").rglob("*.py")),
    (ROOT / "skyfab" / "ssh" / "container.sh").read_text().splitlines(),
]


@pytest.mark.parametrize("message", messages())
def test_a_message_of_troubleshooting_is_in_the_source(message: str) -> None:
    """All its parts are in one module."""
    parts = [part for part in message.split("…") if part.strip()]
    assert any(all(any(part in text for text in texts) for part in parts) for texts in LITERALS)


# ---- pictures


@pytest.mark.parametrize("source", sorted(PICTURES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_picture_is_what_its_source_says(source: Path) -> None:
    """`./inv docs` draws it again."""
    assert source.with_suffix(".svg").read_text() == str(pictures.drawn(source))


def test_the_chart_is_that_of_the_figures_beside_it() -> None:
    """`./inv bench --chart=docs/pictures/bench.svg` makes both."""
    document = json.loads((PICTURES / "bench.json").read_text())
    assert (PICTURES / "bench.svg").read_text() == str(chart.drawn(document))


def test_the_recording_shows_what_the_readme_has_typed() -> None:
    from html import unescape

    recorded = unescape((PICTURES / "terminal.svg").read_text())
    blocks = re.findall(r"^```console\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    typed = [line for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert [line for line in typed if "pip install" not in line and f">{line}<" not in recorded] == []


def test_a_recording_shows_a_line_from_when_it_is_there_until_it_is_not() -> None:
    def line(text: str) -> tuple[Run, ...]:
        return (Run(0, text, "default", False),)

    frames = [
        Frame(10.0, 0, (line("$ l"), ())),
        Frame(10.5, 0, (line("$ ls"), ())),
        Frame(70.0, 1, (line("$ ls"), line("a.txt"))),
    ]
    recording = Recording(20, frames)
    assert recording.text() == ["$ l", "$ ls", "a.txt"]
    picture = str(recording.svg("a title"))
    assert "animation: 7.50s" in picture, "half a second, a minute shown in two seconds, and five at the end"
    assert picture.count('class="line last"') == 2
