"""Turns a host's reply to a call into the result, or into the exception to raise."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from skyfab._util.hints import HINTS
from skyfab._util.signals import is_from_handler
from skyfab.calls.project import with_local_paths
from skyfab.errors import (
    CallCancelled,
    CallTimeout,
    HostUnfit,
    NotPicklable,
    ProtocolError,
    RemoteError,
    RemoteTraceback,
    UntrustedResult,
    WorkerDied,
    printable,
)
from skyfab.protocol import codec, messages
from skyfab.protocol.batches import of_group
from skyfab.protocol.messages import Message

_LONGEST: Final = 1000
"""Longest path, in characters, that is looked up."""
_PACKAGES: Final = """
    Crypto=pycryptodome OpenSSL=pyopenssl PIL=pillow attr=attrs bs4=beautifulsoup4 cv2=opencv-python zmq=pyzmq
    dateutil=python-dateutil dotenv=python-dotenv faiss=faiss-cpu fitz=pymupdf git=gitpython hydra=hydra-core jwt=pyjwt
    mpl_toolkits=matplotlib pkg_resources=setuptools<82 skimage=scikit-image sklearn=scikit-learn yaml=pyyaml
"""
"""Modules, and the packages that they belong to."""


def unpack_result(
    message: Message, buffers: list[memoryview], *, host: str, rank: int | None, label: str, untrusted: bool
) -> Any:
    """The value that a call returned. Raises the exception that it raised, with the host's traceback as cause.

    With `untrusted`, nothing is unpickled: only plain data is accepted.
    """
    if isinstance(message, messages.Result):
        return unpack_value(buffers, plain=message.plain, host=host, rank=rank, label=label, untrusted=untrusted)
    if isinstance(message, messages.Raised):
        found = _exception(message, buffers, host, rank, untrusted)
        trace = with_local_paths(message.traceback, host)
        if note := _note(found, host):
            add_note(found, note)
        raise found from RemoteTraceback(trace, host, rank, message.item)
    if isinstance(message, messages.Ended):
        trace = with_local_paths(message.traceback, host)
        cause = RemoteTraceback(trace, host, rank, message.item) if trace else None
        raise _ending(message, host, rank, label) from cause
    if isinstance(message, messages.Failed):
        raise WorkerDied(message.text, host=host, rank=rank, hint=message.hint)
    raise ProtocolError(f"{message.op} where a result was expected", host=host)


def unpack_group(message: Message, buffers: list[memoryview], **about: Any) -> list[Any]:
    """The same for a call for several items: the seconds that it took, and the values that it returned."""
    if not isinstance(message, messages.Result):
        return unpack_result(message, buffers, **about)  # type: ignore[no-any-return]  # it raises
    if not buffers:
        raise ProtocolError("a result without content", host=about["host"])
    return [unpack_value(value, plain=message.plain, **about) for value in of_group(buffers)]


def unpack_value(
    buffers: list[memoryview], *, plain: bool, host: str, rank: int | None, label: str, untrusted: bool
) -> Any:
    """A value that a call returned or yielded, encoded as `plain` data or pickled.

    Raises NotPicklable and UntrustedResult. With `untrusted`, no pickle is accepted.
    """
    if not buffers:
        raise ProtocolError("a result without content", host=host)
    if plain:
        return _plain(buffers, host=host, rank=rank, label=label)
    if untrusted:
        hint = 'is this a run of a pool without results="data"? such runs keep pickles'
        raise UntrustedResult(f"the result of {label} is a pickle, not plain data", host=host, rank=rank, hint=hint)
    try:
        return codec.loads(buffers[0], buffers[1:])
    except BaseException as error:  # also SystemExit: unpickling calls what the result's class says
        if is_from_handler(error):
            raise
        raise not_unpickled(error, host=host, rank=rank, label=label) from error


def deliver(
    to: Callable[[Any, Exception | None], None],
    message: Message,
    buffers: list[memoryview],
    *,
    unpack: Callable[..., Any] = unpack_result,
    **about: Any,
) -> None:
    """Calls `to` with the result of `unpack`, or with None and the exception that it raises."""
    try:
        value = unpack(message, buffers, **about)
    except Exception as error:
        to(None, error)
    except BaseException as error:  # raised by a signal handler of the program
        to(None, not_unpickled(error, host=about["host"], rank=about["rank"], label=about["label"]))
        raise
    else:
        to(value, None)


def not_unpickled(error: BaseException, *, host: str, rank: int | None, label: str) -> NotPicklable:
    """The error for a result that cannot be unpickled on this machine."""
    return NotPicklable(
        f"the result of {label} cannot be unpickled on this machine: {type(error).__name__}: {error}",
        host=host,
        rank=rank,
        hint="are the packages of its classes installed on this machine?",
    )


def _plain(buffers: Sequence[memoryview], *, host: str, rank: int | None, label: str) -> Any:
    from skyfab.protocol import plain_data  # imported only if it is needed

    try:
        return plain_data.loads(buffers[0], buffers[1:])
    except plain_data.NotPlain as error:
        raise _not_plain(str(error), host=host, rank=rank, label=label) from None


def _not_plain(what: str, *, host: str, rank: int | None, label: str) -> UntrustedResult:
    return UntrustedResult(
        f"the result of {label} is not plain data: {what}",
        host=host,
        rank=rank,
        hint='return plain data, arrays or tensors; or trust the hosts: Compute(…, results="any")',
    )


def _exception(
    message: messages.Raised, buffers: list[memoryview], host: str, rank: int | None, untrusted: bool
) -> BaseException:
    """The exception itself; a RemoteError in its place if it cannot be unpickled, or is not plain data."""
    if buffers and (message.plain or not untrusted):
        try:
            found = _plain_exception(buffers) if message.plain else codec.loads(buffers[0], buffers[1:])
        except BaseException as error:  # unpickling calls what the exception's class says
            if is_from_handler(error):
                raise
            found = None
        if isinstance(found, Exception):
            return found
    name = message.kind.removeprefix("builtins.")
    return RemoteError(f"{name}: {message.text}", kind=message.kind, host=host, rank=rank)


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an error. An exception of the user's may refuse attributes, or have unusual `__notes__`."""
    with contextlib.suppress(Exception):
        vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), note]  # `add_note` is missing before Python 3.11


def _note(error: BaseException, host: str) -> str | None:
    if isinstance(error, ModuleNotFoundError):
        package, own = HINTS.image("pip", _package(error.name)), HINTS.image("includes")
        return f"hint: on {host}: {package} installs it, {own} sends a module of your own"
    if isinstance(error, FileNotFoundError) and (here := _found_here(error.filename, host)):
        name = os.path.relpath(here)
        included = HINTS.image("includes", name)
        ignored = f"; if .gitignore excludes it, --sync=all or skyfab put {shlex.quote(name)}"
        sends = f"{included} sends it along{ignored if included == '--sync' else ''}"
        return f"hint: {here} exists on this machine, not on {host}: {sends}"
    if type(error) is EOFError and str(error) == "EOF when reading a line":
        return f"hint: processes on {host} have no keyboard input: pass the value as an argument"
    return None


def _package(module: object) -> str:
    """The package that a module belongs to: a well-known one, or the one that is installed here."""
    if not isinstance(module, str) or not re.fullmatch(r"[A-Za-z_][\w.]{0,100}", module, re.ASCII):  # from the host
        return ""
    from importlib.metadata import packages_distributions

    top = module.partition(".")[0]
    known = re.search(rf"\s{top}=(\S+)", _PACKAGES)
    return known[1] if known else min(packages_distributions().get(top, [top]))


def _found_here(name: object, host: str) -> Path | None:
    """The local counterpart of a file that a call looked for in its working folder or beside a module, if any."""
    if not isinstance(name, str) or len(name) > _LONGEST or not name.isprintable():  # from the host: not trusted
        return None
    local = with_local_paths(f'File "{name}"', host)[6:-1]
    if local == name and name.startswith("/"):
        return None
    with contextlib.suppress(OSError):
        return path if (path := Path.cwd() / local).exists() else None
    return None


def _plain_exception(buffers: list[memoryview]) -> Exception | None:
    """A plain-data exception that is safe to print; None if it cannot be made safe."""
    from skyfab.protocol import plain_data

    error = plain_data.loads_exception(buffers[0], buffers[1:])
    notes = getattr(error, "__notes__", None)
    if notes is not None:
        error.__notes__ = [printable(note) for note in notes]
    if printable(str(error)) != str(error):
        error.args = (printable(str(error)),)
    return error if printable(str(error)) == str(error) else None


def _ending(message: messages.Ended, host: str, rank: int | None, label: str) -> Exception:
    why, text = message.why, message.text
    if why in ("exit", "died"):
        hint = None
        if message.exitcode == -9 and "memory" in text:
            hint = "process less data at a time, or run fewer ranks on this host (ranks=…)"
        elif message.exitcode == -11:
            hint = "the lines above from faulthandler show where"
        return WorkerDied(f"{label}: {text}", exitcode=message.exitcode, host=host, rank=rank, hint=hint)
    if why == "timeout":
        return CallTimeout(f"{label} took longer than its timeout of {text} and was stopped", host=host, rank=rank)
    if why == "cancelled":
        return CallCancelled(f"{label} was cancelled", host=host, rank=rank)
    if why == "unstored":
        hint = "make the call again: its large arguments are then sent again"
        return HostUnfit(f"{label}: an argument was deleted or changed in the host's store", host=host, hint=hint)
    if why == "unpicklable":
        return NotPicklable(f"{label}: {text}", host=host, rank=rank, hint="return plain data, arrays or tensors")
    if why == "not_plain":
        return _not_plain(text, host=host, rank=rank, label=label)
    return WorkerDied(f"{label} ended: {why} {text}".rstrip(), exitcode=message.exitcode, host=host, rank=rank)


def in_order(found: Sequence[list[tuple[int, Any]] | None]) -> list[Any]:
    """The results of all ranks of an elastic gang, in the rank order of the last attempt. Lost hosts have none.

    Raises ProtocolError for what hosts of no such gang send.
    """
    try:
        pairs = sorted((pair for part in found if part for pair in part), key=lambda pair: pair[0])
        return [value for _, value in pairs]
    except Exception as error:
        raise ProtocolError(f"invalid results: {error}") from None
