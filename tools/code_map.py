"""Draws the map of docs/how_it_works.md: every module with the first sentence of its docstring.

`python -m tools.code_map` writes it; a test compares it with the code.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how_it_works.md"
_FENCE = re.compile(r"(?<=\n```\n)skyfab/\n.*?(?=```)", re.DOTALL)
_COLUMN = 34
_WIDTH = 120


def drawing() -> str:
    """The map as text: folders first by name, then the modules of each."""
    return "skyfab/\n" + "".join(f"{line}\n" for line in _folder(ROOT / "skyfab", ""))


def drawn(page: str) -> str:
    """The map that the page has now."""
    found = _FENCE.search(page)
    return found[0] if found else ""


def _folder(folder: Path, indent: str) -> list[str]:
    modules = [
        path for path in sorted(folder.iterdir()) if path.suffix in (".py", ".sh") and path.name != "__init__.py"
    ]
    folders = [path for path in sorted(folder.iterdir()) if (path / "__init__.py").exists()]
    lines = []
    for entry in (entries := [*modules, *folders]):
        last = entry is entries[-1]
        name = f"{indent}{'└── ' if last else '├── '}{entry.name}{'/' if entry.is_dir() else ''}"
        text = _sentence(entry / "__init__.py" if entry.is_dir() else entry)
        inner = f"{indent}{'    ' if last else '│   '}"
        below = f"{inner}│" if entry.is_dir() else inner
        first, *more = textwrap.wrap(text, _WIDTH - _COLUMN - 1, break_on_hyphens=False) or [""]
        lines.append(f"{name:<{_COLUMN}} {first}".rstrip())
        lines += [f"{below:<{_COLUMN}}   {line}" for line in more]
        if entry.is_dir():
            lines += _folder(entry, inner)
    return lines


def _sentence(path: Path) -> str:
    """The first sentence of a module's docstring, or of the comment at the top of a script."""
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) if path.suffix == ".py" else None
    if docstring is None:
        comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        docstring = "\n".join(line.lstrip("# ") for line in comments if line[:2] == "# " and "shellcheck" not in line)
    text = docstring.partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[a-z)`])[.;] ", text + " ")[0].strip().removesuffix(".")


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_FENCE.sub(lambda _: drawing(), page, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
