"""What a worker replies about calls that did not return: exceptions, exits, and the text of both."""

from __future__ import annotations

import contextlib
import os

from skyfab.protocol import codec, messages

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from typing import Any

_TEXT = 16 * 1024
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_HERE = os.path.dirname(__file__)
_OURS = (
    *(os.path.join(_HERE, name) for name in ("worker.py", "actors.py", "exchanges.py")),
    os.path.join(os.path.dirname(_HERE), "device", ""),
    os.path.join(os.path.dirname(_HERE), "collected.py"),
)
"""Files whose frames come before the user's: those of workers, and of device workers."""


def replay(value: Any, error: Exception | None) -> Any:
    """Ends a call as an earlier one has ended: a detached run keeps the reply."""
    if error is not None:
        raise error
    return value


def exited(error: SystemExit) -> messages.Ended:
    """The reply to a call that called `sys.exit`, which ends the call and not the client's program."""
    code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    said = "" if error.code is None or isinstance(error.code, int) else f": {error.code}"
    return messages.Ended(why="exit", text=cut(f"it called sys.exit({code}){said}"), exitcode=code)


def cut(text: str) -> str:
    """Shortens a text to its beginning and end, because the head of a message is limited."""
    if len(text) <= 2 * _TEXT:
        return text
    return f"{text[:_TEXT]}\n[… {len(text) - 2 * _TEXT} characters …]\n{text[-_TEXT:]}"


def trace(error: BaseException) -> str:
    """The traceback from the user's first frame on."""
    return _formatted(error)[0]


def _formatted(error: BaseException) -> tuple[str, bool]:
    """Its traceback, and whether the exception can be examined: its class may raise in any of its methods."""
    import traceback

    shown = _TRACEBACK.__get__(error)
    while shown is not None and shown.tb_frame.f_code.co_filename.startswith(_OURS):
        shown = shown.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, shown)), True
    except Exception:
        frames = "".join(traceback.format_tb(shown))
        return f"Traceback (most recent call last):\n{frames}{type(error).__qualname__}\n", False


def said(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "<its str() failed>"


def describe(error: BaseException, encoding: Any, **about: Any) -> tuple[messages.Raised, codec.Payload | None]:
    """The reply to a call that raised, and the encoded exception if it can be encoded."""
    text, is_usable = _formatted(error)
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    payload = None
    if is_usable and isinstance(error, Exception):
        with contextlib.suppress(BaseException):
            payload = encoding.dumps_exception(error)
    parts = payload.parts if payload else ()
    return messages.Raised(parts=parts, kind=cut(kind), text=cut(said(error)), traceback=cut(text), **about), payload
