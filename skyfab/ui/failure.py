"""Formats a failure for users: their own frames, then the host's, and on the last line the cause, with host and rank.

Python prints an uncaught exception with every frame of skyfab, and several ranks' failures as a tree whose last line is
any of them. `install` replaces that for errors that have to do with a pool; SKYFAB_TRACE=1 keeps Python's own form.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pickle
import re
import shlex
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from skyfab._util.hints import HINTS
from skyfab._util.sizes import counted
from skyfab.errors import BroadcastError, HostUnfit, RemoteTraceback, SkyfabError, located
from skyfab.ui.terminal import clean_lines, ipython

_HEADER: Final = "Traceback (most recent call last):"
_HIDDEN: Final = (
    *(f"{path}{os.sep}" for path in (Path(__file__).absolute().parents[1], Path(concurrent.futures.__file__).parent)),
    pickle.__file__,
)
_FRAME: Final = re.compile(
    r'(?P<margin>(?: *\| )?)  File "'
    r'(?P<hidden>[^"]*/bundles/[0-9a-f]+/(?:skyfab|cloudpickle)/|<frozen (?:runpy|importlib))?'
)
"""A frame on a host; in an exception group it has a margin. `hidden` matches if it is not the program's."""
_CHAIN: Final = {
    True: "\nThe above exception was the direct cause of the following exception:\n",
    False: "\nDuring handling of the above exception, another exception occurred:\n",
}


def text(error: BaseException) -> str:
    """What an uncaught exception shows. It may quote a host, so terminal control sequences are removed."""
    return clean_lines("\n".join(_chain(error)))


def summary(error: BaseException, prefix: str = "") -> str:
    """The host's frames and the cause, without frames of this program."""
    return clean_lines("\n".join([*_remote(_first(error)), *_ending(error, prefix)]))


def is_from_pool(error: BaseException) -> bool:
    """It was raised by skyfab, or by a call."""
    return any(
        isinstance(one, (SkyfabError, RemoteTraceback)) or any(_is_hidden(frame) for frame in _frames(one))
        for one in _causes(error)
    )


def stopped(error: BaseException) -> Sequence[str]:
    """Where Ctrl-C has stopped something; in a coroutine, the exception that it came from says so."""
    return [*filter(None, (getattr(one, "stopped", "") for one in _causes(error)))][:1]


# ---- parts


def _first(error: BaseException) -> BaseException:
    return error.exceptions[0] if isinstance(error, BroadcastError) else error


def _chain(error: BaseException) -> Iterator[str]:
    chain = [one for one in reversed(_causes(error)) if not isinstance(one, RemoteTraceback)]
    for one in chain:
        if one is not chain[0]:
            yield _CHAIN[one.__cause__ is not None]
        frames = [*_shown_frames(one)]
        if frames:
            yield _HEADER
            yield "".join(traceback.format_list(frames)).rstrip()
        yield from _remote(_first(one))
        yield from _ending(one)


def _causes(error: BaseException | None) -> list[BaseException]:
    """The exception and what it came from, the latest first; once each."""
    found: dict[int, BaseException] = {}
    while error is not None and id(error) not in found:
        found[id(error)] = error
        is_caused = error.__cause__ is not None or error.__suppress_context__
        error = error.__cause__ if is_caused else error.__context__
    return list(found.values())


def _frames(error: BaseException) -> Sequence[traceback.FrameSummary]:
    return traceback.extract_tb(error.__traceback__)


def _shown_frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    is_hidden = False
    for frame in _frames(error):
        if not (is_hidden and frame.filename == contextlib.__file__):  # else it is as the frame that it is called from
            is_hidden = _is_hidden(frame) or "/IPython/core/" in frame.filename
        if not is_hidden:
            yield frame


def _is_hidden(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_HIDDEN) or Path(frame.filename).parent.name == "cloudpickle"


def _remote(error: BaseException) -> Iterator[str]:
    """The frames on the host. A chain of exceptions there is shown as it is."""
    cause = error.__cause__
    if not isinstance(cause, RemoteTraceback):
        return
    lines = cause.text.rstrip().split("\n")
    if lines[0] == _HEADER and lines.count(_HEADER) == 1:
        lines = lines[1:]
        lines = lines[: next((n for n, line in enumerate(lines) if not line.startswith(" ")), len(lines))]
    elif _is_message(lines[0], error):  # without a frame of the program: the message follows below
        lines = [line for line in lines if line.startswith("hint: ")]
    lines = list(_own_frames(lines))
    if lines:
        yield f"on {_place(error)}:"
        yield "\n".join(lines)


def _is_message(line: str, error: BaseException) -> bool:
    """Whether a line is how Python prints the exception, as ``TypeError: f() missing 1 required argument``."""
    kind, message = _kind(error)
    said = line.partition(": ")[2] or line.rpartition(".")[2]
    return said in f"{kind.__name__}: {message}".split("\n")[0]


def _own_frames(lines: Sequence[str]) -> Iterator[str]:
    """The lines without the frames of skyfab and of what starts a script."""
    hidden: str | None = None  # the margin of the frame that is being left out
    for line in lines:
        if frame := _FRAME.match(line):
            hidden = frame["margin"] if frame["hidden"] else None
        elif hidden is not None and not line.startswith(f"{hidden}  "):
            hidden = None
        if hidden is None:
            yield line


def _ending(error: BaseException, prefix: str = "") -> Iterator[str]:
    """What happened, the cause on the last line, and what to do about it."""
    if isinstance(error, BroadcastError):
        typed, first = not prefix, _kind(_first(error))
        if typed or not all(isinstance(one, HostUnfit) for one in error.exceptions):  # else the program did not begin
            yield f"{prefix}{error.message}"
            prefix = ""
        alike = Counter(map(_kind, error.exceptions))
        for kind in sorted(alike, key=first.__eq__):  # the first failure is the last line
            one = next(failure for failure in error.exceptions if _kind(failure) == kind)
            more = alike[kind] - 1
            yield prefix + _line(one, typed=typed) + (f" (same error on {counted(more, 'more rank')})" if more else "")
            prefix = ""
        yield from _hints(error) or _hints(_first(error))
    elif isinstance(error, SkyfabError) and hasattr(error, "exceptions"):
        yield f"{prefix}{error}"
    elif isinstance(error, SkyfabError) or isinstance(error.__cause__, RemoteTraceback):
        yield f"{prefix}{_line(error, typed=not prefix)}"
        yield from _hints(error)
    else:
        yield prefix + "".join(traceback.format_exception_only(type(error), error)).rstrip()


def _kind(error: BaseException) -> tuple[type, str]:
    try:
        return type(error), error.message if isinstance(error, SkyfabError) else str(error)
    except Exception:
        return type(error), "<exception str() failed>"  # as Python has it


def _line(error: BaseException, *, typed: bool) -> str:
    """Host, rank, type and message; at the command line, without the type of skyfab's own errors."""
    place, kind, message = _place(error), *_kind(error)
    if isinstance(error, SkyfabError) and not typed:
        return f"{place}: {message}" if place else message
    return " ".join(filter(None, [place, f"{kind.__name__}: {message}" if message else kind.__name__]))


def _place(error: BaseException) -> str:
    cause = error.__cause__
    host, rank = (cause.host, cause.rank) if isinstance(cause, RemoteTraceback) else (None, None)
    if isinstance(error, SkyfabError):
        host, rank = error.host or host, rank if error.rank is None else error.rank
    return located(host, rank) if host else ""


def _hints(error: BaseException) -> list[str]:
    hint = getattr(error, "hint", None)
    return [*map(str, getattr(error, "__notes__", ())), *([f"hint: {hint}"] if hint else [])]


# ---- where Python prints uncaught exceptions


def install() -> None:
    """Formats uncaught exceptions that have to do with a pool, from now on. Leaves hooks of the program alone."""
    if os.environ.get("SKYFAB_TRACE"):
        return
    hook = sys.excepthook
    if hook is sys.__excepthook__ or hook.__module__.partition(".")[0] == "exceptiongroup":  # which Python 3.10 needs
        sys.excepthook = functools.partial(_hook, hook)
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _thread_hook
    shell = ipython()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((BaseException,), _show_in_ipython)


def _hook(other: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not _show(error):
        other(kind, error, trace)


def _thread_hook(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or not _show(args.exc_value, f"in thread {args.thread.name if args.thread else '?'}:\n"):
        threading.__excepthook__(args)


def _show_in_ipython(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any) -> None:
    shown = _shown(error)
    if shown is None:
        lines = shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=tb_offset)
    else:
        lines = shown.split("\n")
    shell._showtraceback(kind, error, lines)  # noqa: SLF001 - as IPython's own error handlers do


def _show(error: BaseException, before: str = "") -> bool:
    """Prints it if it has to do with a pool; returns whether it did."""
    shown = _shown(error)
    if shown is not None:
        print(f"{before}{shown}", file=sys.stderr)
    return shown is not None


@contextlib.contextmanager
def left_running(run: str, text: str = "") -> Iterator[None]:
    """Ctrl-C during the block does not stop the run, which its message says."""
    try:
        yield
    except KeyboardInterrupt as error:
        text = text or f"the run was not stopped; to stop it: skyfab stop {shlex.quote(run)}"
        vars(error)["stopped"] = HINTS.adapted(text)
        raise


def _shown(error: BaseException) -> str | None:
    """The text, if it has to do with a pool."""
    try:
        if not is_from_pool(error):
            return None
        if isinstance(error, KeyboardInterrupt):
            return ": ".join(["interrupted", *stopped(error)])
        return text(error)
    except Exception:  # an exception of the program whose parts cannot be printed: Python copes with these
        return None
