"""The trials of a sweep: all combinations of the values that were typed, or one for each line of a file."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skyfab._util import brackets
from skyfab._util.sizes import counted
from skyfab.calls.manifest import text_of
from skyfab.errors import UsageError

MOST: Final = 10_000
"""Trials of a sweep, at most."""
_NAME: Final = 100
"""Characters of a folder's name, without the number."""
_COMMENT: Final = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?<!\S)#.*""")
"""A comment, or in its first group what cannot begin one. As in shells, it begins a word."""
_RANGE: Final = re.compile(r"(?!\.\.$)([^/]*?)\.\.([^/]*)")  # not a path, such as ../data


def trials_of(patterns: Sequence[str], grid: str | None = None) -> list[tuple[str, ...]]:
    """The words for the script, for each trial. Raises UsageError.

    >>> trials_of(["lr=1e-3,1e-4", "--fast"])
    [('lr=1e-3', '--fast'), ('lr=1e-4', '--fast')]
    """
    if not patterns and grid is None:
        raise UsageError("no trials", hint="add values to try, as in lr=1e-3,1e-4 seed=1..5, or --grid=FILE")
    columns = [_values(pattern) for pattern in patterns]
    lines = [()] if grid is None else _lines(Path(grid).expanduser())
    count = len(lines) * math.prod(map(len, columns))
    if count > MOST:
        raise UsageError(f"{counted(count, 'trial')}: a sweep has at most {MOST:,}", hint="use fewer values")
    for option, word in itertools.pairwise(patterns):
        if count == 1 and option.startswith("-") and "=" not in option and "," in word:
            raise UsageError(f"{option} {word} is one trial", hint=f"to try each value: {option}={word}")
    found = [(*line, *words) for line in lines for words in itertools.product(*columns)]
    if len(set(found)) < count:
        ((twice, _),) = Counter(found).most_common(1)
        raise UsageError(f"the same trial twice: {shlex.join(twice)}", hint="to repeat trials, add a seed: seed=1..3")
    return found


def _values(pattern: str) -> Sequence[str]:
    """The words that a pattern expands to."""
    name, equals, text = pattern.partition("=")
    if not equals:
        return [pattern]
    found: list[str] = []
    for value in brackets.split(text):
        if not text:
            raise UsageError(f"no values in {pattern!r}", hint=f"write values after the =: {name}=1e-3,1e-4")
        if not value:
            raise UsageError(f"an empty value in {pattern!r}", hint="write no space after a comma, or use --grid=FILE")
        match = _RANGE.fullmatch(value)
        found += [f"{name}={one}" for one in ([value] if match is None else _numbers(match[1], match[2]))]
    return found


def _numbers(first: str, last: str) -> list[str]:
    try:
        start, end = int(first), int(last)
    except ValueError:
        raise UsageError(f"{first}..{last}: ranges need whole numbers", hint="list the values: 0.1,0.2") from None
    if not 0 <= end - start < MOST:
        how_many = "no trials" if end < start else f"more than {MOST:,} trials"
        raise UsageError(f"{first}..{last} gives {how_many}", hint=f"smallest first, as in 1..5; {MOST:,} at most")
    width = len(first) if first.startswith("0") else 0  # 01..10
    return [f"{number:0{width}}" for number in range(start, end + 1)]


def _lines(path: Path) -> list[tuple[str, ...]]:
    found = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        try:
            found.append(tuple(shlex.split(_COMMENT.sub(lambda part: part[1] or "", line))))
        except ValueError as error:
            raise UsageError(f"{path}: line {number}: {str(error).lower()}") from None
    if not any(found):
        raise UsageError(f"{path} contains no trials", hint="each line has the arguments of a trial: lr=1e-3 seed=1")
    return [words for words in found if words]


def names_of(trials: Sequence[Sequence[str]]) -> list[str]:
    """A name for the folder of each trial: the words that not all trials have.

    >>> names_of([["--lr=1e-3", "data=a/b"], ["--lr=1e-4", "data=a/b"]])
    ['lr=1e-3', 'lr=1e-4']
    """
    common = set.intersection(*map(set, trials)) if len(trials) > 1 else set()
    names = ["-".join(word.lstrip("-") for word in words if word not in common) for words in trials]
    return [re.sub(r"[^\w.=+-]+", "_", name, flags=re.ASCII)[:_NAME] for name in names]
