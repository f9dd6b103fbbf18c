"""The command line program `skyfab`: its commands are listed in tasks.py; each has a module of its own.

``from skyfab.cli import namespace`` adds them to your own tasks.py, for ``invoke``.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing `typing` takes a moment, in which Ctrl-C would show where
if TYPE_CHECKING:
    from typing import Any

    from skyfab.cli.invoke_tasks import namespace as namespace


def main() -> None:
    """Runs the `skyfab` program."""
    try:
        from skyfab.cli import tasks

        tasks.main()
    except KeyboardInterrupt:  # while the commands are loaded, which takes a moment
        sigterm = sys.modules.get("skyfab.cli.sigterm")
        terminated = sigterm is not None and sigterm.SIGTERM.came
        sys.stderr.write("terminated\n" if terminated else "interrupted\n")
        sys.exit(143 if terminated else 130)


def __getattr__(name: str) -> Any:
    if name != "namespace":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyfab.cli.invoke_tasks import namespace  # loads invoke, which takes longer than all the rest

    return namespace
