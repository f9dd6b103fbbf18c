"""Suggests the known word that is closest to a misspelled one."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The closest known word; None if none is close, or if others are as close as that."""
    near = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=2)
    ratios = {difflib.SequenceMatcher(None, one, word).ratio() for one in near}
    return near[0] if near and len(ratios) == len(near) else None


def did_you_mean(words: str | Iterable[str], known: Iterable[str]) -> str | None:
    """A hint with the closest known word for each wrong one; None if none is close."""
    candidates = list(known)
    wrong = [words] if isinstance(words, str) else words
    near = [match for word in wrong if (match := nearest(word, candidates))]
    return f"did you mean {', '.join(dict.fromkeys(near))}?" if near else None


def similar_path(path: Path, suffix: str = "") -> str | None:
    """A hint with the file or folder that may have been meant by a path that does not exist."""
    try:
        names = [one.name for one in path.parent.iterdir() if one.name.endswith(suffix)]
    except OSError:
        return None
    name = nearest(path.name, names)
    return None if name is None else f"did you mean {shlex.quote(str(path.with_name(name)))}?"
