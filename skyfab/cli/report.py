"""Formats an exception for the command line (details first, then the error and its hint), and chooses the exit code."""

from __future__ import annotations

from collections import Counter

from skyfab.errors import BroadcastError, RemoteTraceback, SkyfabError
from skyfab.ui.terminal import clean_lines


def is_expected(error: BaseException) -> bool:
    """Whether the message is enough: an error of skyfab, or one from a host. Others are bugs in skyfab."""
    return isinstance(error, SkyfabError) or isinstance(error.__cause__, RemoteTraceback)


def exit_code(error: BaseException) -> int:
    """1: the user's code failed; 2: usage or inventory; 3: a host could not be reached or was lost."""
    first = error.exceptions[0] if isinstance(error, BroadcastError) else error
    return first.exit_code if isinstance(first, SkyfabError) else 1


def text(error: BaseException) -> str:
    """The text to print. It may quote a host, so terminal control sequences are removed."""
    if isinstance(error, BroadcastError):
        return clean_lines(_broadcast(error))
    if isinstance(error, SkyfabError):
        return clean_lines(_traceback(error) + f"error: {error}")
    return clean_lines(_traceback(error) + f"error: {_line(error)}" + _hint(error))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _broadcast(error: BroadcastError) -> str:
    """The first failure in full, then one line for each kind of failure."""
    first = error.exceptions[0]
    alike = Counter(_kind(failure) for failure in error.exceptions)
    unlike = {_kind(failure): failure for failure in reversed(error.exceptions)}
    lines = []
    for kind in alike:
        more = alike[kind] - 1
        tail = f" (and {counted(more, 'more rank')} alike)" if more else ""
        lines.append(f"  {_line(unlike[kind])}{tail}")
    return "\n".join([f"{_traceback(first)}error: {error.message}", *lines]) + (_hint(error) or _hint(first))


def _kind(error: Exception) -> tuple[type, str]:
    return type(error), error.message if isinstance(error, SkyfabError) else str(error)


def _line(error: BaseException) -> str:
    """Host, rank and message in one line."""
    cause = error.__cause__
    host, rank = (cause.host, cause.rank) if isinstance(cause, RemoteTraceback) else (None, None)
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SkyfabError):
        host, rank, said = error.host or host, error.rank if error.rank is not None else rank, error.message
    place = "" if not host else f"{host}: " if rank is None else f"{host}[{rank}]: "
    return place + said


def _traceback(error: BaseException) -> str:
    cause = error.__cause__
    return f"{cause.text.rstrip()}\n" if isinstance(cause, RemoteTraceback) else ""


def _hint(error: BaseException) -> str:
    hint = getattr(error, "hint", None)
    return f"\nhint: {hint}" if hint else "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
