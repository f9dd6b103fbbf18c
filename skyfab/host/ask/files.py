"""What a worker on a host runs for a transfer: one source or target, and the requests to it.

A reply is JSON and, beside it, the content of files: nothing that comes from a host is unpickled.
"""

from __future__ import annotations

import errno
import json
import os
import zlib

from skyfab.context import own_folder, own_stores
from skyfab.files.entries import FILE, is_inner, text, walk, words
from skyfab.files.source import Source, matching
from skyfab.files.target import Target
from skyfab.host import compiled
from skyfab.host.agent.workdir import copied_at, is_written, note_transferred
from skyfab.protocol.codec import Payload

TYPE_CHECKING = False  # importing `typing` would slow the start of a transfer
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from skyfab.files.entries import Entry
    from skyfab.host.mirror import News

_side: Any = None
"""Of this process, a source, a target, a relay or a cache of the hub: a transfer has a worker of its own."""
_relays: dict[int, Any] = {}
"""By which files of the target come, and are passed on."""
_mirror: News | None = None


def serve(request: str, *arguments: Any) -> Payload:
    """Carries out a request. Data of files, if any, is the last argument or part of the reply."""
    global _side
    try:
        if request in _OPENING:
            _side, found = _OPENING[request](*arguments)
        elif _side is None:
            raise OSError(errno.ESTALE, "the process of the transfer was killed")
        else:
            found = (_OTHERS.get(request) or getattr(_side, request))(*arguments)
    except OSError as error:
        return Payload(json.dumps({"errno": error.errno, "text": words(error)}).encode())
    data: Sequence[memoryview] = ()
    if isinstance(found, tuple) and isinstance(found[-1], bytes):
        *found, content = found
        data = [memoryview(content)]
    return Payload(json.dumps({"value": found}).encode(), data)


def _receive(to: bytes, what: Entry, keep_newer: bool) -> tuple[Target, tuple[str, str, int]]:
    """The target of an upload of a file or folder: its path, the name of a file in it, and how many bytes are free.

    `to` is the thing itself, or with a slash at its end the folder that it goes into. A file goes into a folder that is
    there.
    """
    to, name, is_file = os.path.expanduser(to), what.path, what.kind == FILE
    into = to.endswith(b"/") or (is_file and os.path.isdir(to))
    if is_file:
        folder, name = (to, name) if into else (os.path.dirname(to), os.path.basename(to))
    else:
        folder = os.path.join(to, name) if into else to
    if is_file and not is_inner(name):
        raise FileNotFoundError(2, "not the name of a file", to)
    target = Target(os.path.abspath(folder or b"."), top=None if is_file else what, keep_newer=keep_newer)
    return target, (os.fsdecode(target.path), text(name), target.room)


def _send(patterns: Sequence[bytes]) -> tuple[Source, str]:
    """The source of a download: files and folders, or patterns; relative to the working folder.

    In a copy of a working folder, what was copied with it is left out, except for a file that is named: another run may
    have newer ones.
    """
    skipped: list[Any] = []
    return Source(_listed(patterns, skipped), skipped), os.getcwd()


def _listed(patterns: Sequence[bytes], skipped: list[Any]) -> Iterator[tuple[Entry, bytes]]:
    found, since = matching(patterns, skipped), copied_at(os.getcwd())
    if not since:
        return found
    named = {os.path.normpath(pattern) for pattern in patterns}
    return (pair for pair in found if pair[0].kind is not FILE or pair[0].path in named or _is_own(pair[1], since))


def _news(patterns: Sequence[bytes], last: bool) -> tuple[Source, tuple[int, int]]:
    """The source of what is next for a mirror: how many entries it has, and how many files are changing."""
    from skyfab.host.mirror import News

    global _mirror
    _mirror = _mirror or News()
    skipped: list[Any] = []
    source, count, changing = _mirror.look(_listed(patterns, skipped), skipped, last=last)
    return source, (count, changing)


def _is_own(path: bytes, since: float) -> bool:
    try:
        return path.startswith(b"/") or is_written(os.lstat(path), since)
    except FileNotFoundError:  # just now: reported when it is read
        return True


def _fetched(patterns: Sequence[bytes]) -> None:
    """What these patterns mean has been fetched."""
    assert isinstance(_side, Source)
    paths = _side.paths if _mirror is None else _mirror.take()
    _note(patterns, paths)


def _finish() -> None:
    """All files have been sent: the program's functions did not write them."""
    assert isinstance(_side, Target)
    _side.finish()
    paths = _side.settled()
    _note(paths, paths)


def _note(what: Sequence[bytes], paths: Iterable[bytes]) -> None:
    note_transferred(f"transferred.{zlib.crc32(b'/'.join(what))}", paths, os.path.dirname(own_folder()))


def _open(*about: Any) -> tuple[Any, list[tuple[int, int]]]:
    """The host's part in a relay, and which of its items the store lacks."""
    from skyfab.host.relay import StoreRelay  # its imports would slow the start of other transfers

    relay = StoreRelay(*about)
    return relay, relay.lacks


def _relay(place: int, request: str, *arguments: Any) -> Any:
    """A request to one of the relays of the target."""
    if request == "open":
        from skyfab.host.relay import FileRelay

        assert isinstance(_side, Target)
        _relays[place] = FileRelay(_side, *arguments)
        return _relays[place].lacks
    return getattr(_relays[place], request)(*arguments)


def _hub() -> tuple[Any, None]:
    """The host's cache of the hub."""
    from skyfab.host.download import Downloads  # its imports would slow the start of other transfers

    return Downloads(os.path.dirname(own_stores()[-1])), None


def _compiled(way: str) -> tuple[Any, str]:
    """The source (`send`) or target of the host's compiled kernels, and their key, which is empty if it has none."""
    folder = os.fsencode(compiled.folder())
    side: Any = None
    if folder and way == "receive":
        side = Target(folder)
    elif folder:
        side = Source(walk(folder, b"", [], compiled.is_code) if os.path.isdir(folder) else (), [])
    return side, os.path.basename(folder).decode()


_OPENING: dict[str, Any] = {
    "receive": _receive,
    "send": _send,
    "news": _news,
    "open": _open,
    "hub": _hub,
    "compiled": _compiled,
}
"""The requests that begin something: each returns a side and the reply."""
_OTHERS: dict[str, Any] = {"fetched": _fetched, "finish": _finish, "relay": _relay}
