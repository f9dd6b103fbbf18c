"""Writes environment variables to a file that a shell reads and deletes: they are in no command line."""

from __future__ import annotations

import os
import secrets
import shlex
import time

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from typing import Final

_OLD: Final = 300.0
"""Seconds after which the file of a login that failed is deleted."""


def variables(cache: str, *, values: dict[str, str]) -> str:
    """Returns the name of the file in the cache."""
    for name in os.listdir(cache):
        path = os.path.join(cache, name)
        if name.startswith("ssh-") and time.time() - os.stat(path).st_mtime > _OLD:
            os.unlink(path)
    name = f"ssh-{secrets.token_hex(8)}"
    lines = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in values.items())
    with open(os.path.join(cache, name), "xb") as file:  # for this user alone, by the umask
        file.write(lines.encode(errors="surrogateescape"))
    return name
