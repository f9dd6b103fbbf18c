"""Sets up a worker process: environment, paths, standard streams, and what its functions can ask about their run."""

from __future__ import annotations

import faulthandler
import os
import sys
import types

from skyfab import context

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Any


def set_up(request: dict[str, Any]) -> None:
    """Sets this process up as if it had been started only for the user's code."""
    os.umask(int(os.environ.pop("SKYFAB_UMASK", "022"), 8))
    os.environ.update(request["env"])
    os.environ["SKYFAB_RANK"] = str(request["id"])  # inherited: tells the zygote which worker started a process
    sys.path[:0] = request["path"]
    sys.argv = [""]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.stdout = sys.__stdout__ = _text(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2)  # type: ignore[misc]
    sys.breakpointhook = _no_keyboard
    faulthandler.enable(sys.stderr)
    info = request["info"]
    context.worker_folder, context.worker_stores, context.worker_run = os.getcwd(), request["stores"], request["run"]
    context.offer_stacks(request["worker"], info.get("rank", 0))
    context.hold_listener(request["listener"])
    context.enter(context.InstanceInfo(**{**info, "peers": tuple(info["peers"])}))


def _text(fd: int) -> Any:
    """A line-buffered text stream."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _no_keyboard(*args: Any, **kwargs: Any) -> Any:
    """Replaces `breakpoint()` in a worker, unless PYTHONBREAKPOINT names something other than pdb."""
    if os.environ.get("PYTHONBREAKPOINT", "") not in ("", "pdb.set_trace"):
        return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100
    raise RuntimeError("breakpoint() in a rank: debuggers do not work, because this process has no keyboard input")
