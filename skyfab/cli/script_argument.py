"""What `skyfab run` and `put` are given: is it there, and has the file a function of that name. Says what is near."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from skyfab._util.suggest import nearest
from skyfab.errors import UsageError

_DYNAMIC: Final = r"import \*|\b(?:globals|locals|vars|exec|eval|setattr|__getattr__|__dict__)\b"
"""A module that uses one of these may have names that do not occur in its text."""
_MOST: Final = 8
"""Functions that are named."""


def near(path: Path, suffix: str = "") -> str | None:
    """A hint with the file or folder that may have been meant by a path that does not exist."""
    try:
        names = [one.name for one in path.parent.iterdir() if one.name.endswith(suffix)]
    except OSError:
        return None
    name = nearest(path.name, names)
    return None if name is None else f"did you mean {shlex.quote(str(path.with_name(name)))}?"


def check_function(script: Path, shown: str, function: str) -> None:
    """Raises UsageError if a file, which the user called `shown`, cannot have a function of that name.

    If the name occurs in the file at all, hosts find out whether it is a function.
    """
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {shown}: {error.strerror}") from None
    if re.search(rf"\b{function}\b|{_DYNAMIC}", text):
        return
    names = list(dict.fromkeys(re.findall(r"^(?:async +)?def +([^\W_]\w*)", text, re.MULTILINE)))
    has = f"it defines {', '.join(names[:_MOST])}{', …' if len(names) > _MOST else ''}" if names else "it defines none"
    meant = nearest(function, names)
    hint = None if meant is None else f"did you mean {shlex.quote(f'{shown}:{meant}')}?"
    raise UsageError(f"{shown} has no function {function}: {has}", hint=hint)
