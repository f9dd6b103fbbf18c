"""The command line program `skyfab`: its commands are listed in tasks.py; each has a module of its own.

``from skyfab.cli import namespace`` adds them to your own tasks.py, for ``invoke``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyfab.cli.tasks import main as main

if TYPE_CHECKING:
    from skyfab.cli.invoke_tasks import namespace as namespace


def __getattr__(name: str) -> Any:
    if name != "namespace":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyfab.cli.invoke_tasks import namespace  # loads invoke, which takes longer than all the rest

    return namespace
