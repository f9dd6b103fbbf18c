"""Runs a script or a function of it as one rank: the host's side of `skyfab run`. Standard library only."""

from __future__ import annotations

import sys

from skyfab.context import awaited, flush_files

TYPE_CHECKING = False  # importing `typing` would slow down a cold start
if TYPE_CHECKING:
    from typing import Any


def perform(name: str, function: str, arguments: list[str], folder: str | None) -> None:
    """Runs the file with this name, or a function of it; or for a name without .py, a module as ``python -m`` does.

    It is on `sys.path`, in the project tree; with `folder`, the one that was laid out there runs, beside its data.
    """
    import importlib
    import os
    import runpy

    if folder is not None:
        sys.path.insert(0, os.path.abspath(folder))  # noqa: PTH100
    path = name
    if name.endswith(".py"):
        path = next(path for folder in sys.path if os.path.isfile(path := os.path.join(folder, name)))  # noqa: PTH113,PTH118
    sys.argv = [path, *arguments]
    try:
        if function:
            found: Any = getattr(importlib.import_module(name.removesuffix(".py")), function)
            awaited(getattr(found, "fn", found)(*arguments))
        elif path is name:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        _finish()
        if function or end.code not in (None, 0):
            raise
    except BaseException:
        _finish(threads=False)  # the failure is reported now, whatever else still runs
        raise
    else:
        _finish()


def _finish(*, threads: bool = True) -> None:
    """Does what Python does when a program ends: waits for threads, runs `atexit`, writes what open files still hold.

    The process of a rank does not end with the script, and never in this way.
    """
    import atexit
    import gc
    import threading

    if threads:
        threading._shutdown()  # type: ignore[attr-defined]  # thread pools are ended too
    atexit._run_exitfuncs()
    flush_files()
    gc.collect()  # closes what only the script has referred to: archives, databases
