"""Which files of a folder are taken: without hidden folders, caches, environments, and what patterns exclude.

Imports pathspec inside of functions: hosts import this module without it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pathspec

    from skyfab.files.entries import Keeps

_SKIPPED: Final = frozenset({b"__pycache__", b"node_modules", b"site-packages", b"dist-packages"})


def patterns(lines: Sequence[str]) -> Callable[[str], bool]:
    """Whether a path, with a slash at its end if it is that of a folder, matches patterns as in .gitignore."""
    return _spec(lines).match_file if lines else lambda path: False


def _spec(lines: Sequence[str]) -> pathspec.GitIgnoreSpec:
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(lines)


def without(excluded: Callable[[str], bool]) -> Keeps:
    """All files but those that are excluded, by their paths."""

    def keeps(child: os.DirEntry[bytes], path: bytes) -> bool:
        return _is_wanted(child) and not excluded(os.fsdecode(path) + ("/" if child.is_dir() else ""))

    return keeps


def as_git(top: Path) -> Keeps:
    """All files but those that .gitignore excludes: those of the folder, below it, and above it in its repository."""
    chain = [top, *top.parents]
    last = next((folder for folder in chain if os.path.exists(folder / ".git")), top)

    @functools.cache
    def spec_of(folder: Path) -> pathspec.GitIgnoreSpec | None:
        try:
            return _spec((folder / ".gitignore").read_text().splitlines())
        except (OSError, UnicodeDecodeError):
            return None

    def keeps(child: os.DirEntry[bytes], path: bytes) -> bool:
        if not _is_wanted(child):
            return False
        whole = top / os.fsdecode(path)
        tail = "/" if child.is_dir() else ""
        for folder in whole.parents:  # the deepest .gitignore takes precedence
            spec = spec_of(folder)
            verdict = spec.check_file(whole.relative_to(folder).as_posix() + tail).include if spec else None
            if verdict is not None or folder == last:
                return not verdict
        return True

    return keeps


def _is_wanted(child: os.DirEntry[bytes]) -> bool:
    if not os.access(child.path, os.R_OK):  # as what others keep to themselves in /tmp
        return False
    if not child.is_dir():
        return not child.name.endswith((b".pyc", b".pyo"))
    is_hidden = child.name in _SKIPPED or child.name.startswith(b".")
    return not is_hidden and not os.path.exists(os.path.join(child.path, b"pyvenv.cfg"))
