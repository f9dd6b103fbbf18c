"""Selects the files of a folder to send: not hidden folders, caches, environments, or what patterns exclude.

Imports pathspec inside of functions: hosts import this module without it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pathspec

    from skyfab.files.entries import Keeps

_SKIPPED: Final = frozenset({b"__pycache__", b"node_modules", b"site-packages", b"dist-packages"})


def spec_of(lines: Iterable[str]) -> pathspec.GitIgnoreSpec:
    """Patterns as in .gitignore. As in git, those that are invalid match nothing."""
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(filter(is_valid, lines))


def is_valid(line: str) -> bool:
    """Whether it is a pattern, a comment or empty."""
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return True


def as_git(top: Path) -> Keeps:
    """All files but those that .gitignore excludes: those of the folder, below it, and above it in its repository."""
    chain = [top, *top.parents]
    last = next((folder for folder in chain if os.path.exists(folder / ".git")), top)

    @functools.cache
    def spec_in(folder: Path) -> pathspec.GitIgnoreSpec | None:
        try:
            return spec_of((folder / ".gitignore").read_text("utf-8-sig", "surrogateescape").splitlines())
        except OSError:
            return None

    def keeps(child: os.DirEntry[bytes], path: bytes) -> bool:
        if not is_kept(child, path):
            return False
        whole = top / os.fsdecode(path)
        tail = "/" if child.is_dir() else ""
        for folder in whole.parents:  # the deepest .gitignore takes precedence
            spec = spec_in(folder)
            verdict = spec.check_file(whole.relative_to(folder).as_posix() + tail).include if spec else None
            if verdict is not None or folder == last:
                return not verdict
        return True

    return keeps


def is_kept(child: os.DirEntry[bytes], _: bytes) -> bool:
    """Whether it is neither compiled code nor a hidden folder, a cache or an environment."""
    if not child.is_dir():
        return not child.name.endswith((b".pyc", b".pyo"))
    is_hidden = child.name in _SKIPPED or child.name.startswith(b".")
    return not is_hidden and not os.path.exists(os.path.join(child.path, b"pyvenv.cfg"))
