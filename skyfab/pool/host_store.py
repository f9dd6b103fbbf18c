"""What a host of a pool has been sent: blobs (large buffers, files of the project) and project trees.

It sends only what the host lacks. Nothing here blocks except `sync`.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from skyfab.calls.pack import PackedCall
from skyfab.calls.project import Tree
from skyfab.errors import HostUnfit, ProtocolError, SkyfabError
from skyfab.protocol import messages
from skyfab.protocol.blobs import LARGE, name_of
from skyfab.protocol.frames import Buffer
from skyfab.session.replies import Failure
from skyfab.session.session import Session

_HELD: Final = 64 * 1024 * 1024
"""Bytes of the project's files that are held in memory until the host has received them."""
_SAMPLES: Final = 4096
"""Samples of large arguments that are kept, to detect repeated ones."""


class HostStore:
    """What one host has received in its current session, and what is being sent to it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._session: Session
        self._lock = threading.RLock()
        self._trees = {""}
        self._blobs: set[str] = set()
        self._coming: dict[str, list[Callable[[Exception | None], None]]] = {}
        """Blobs that are being sent, with the callbacks that wait for them."""
        self._seen: OrderedDict[tuple[int, bytes], None] = OrderedDict()

    def reset(self, session: Session) -> list[Callable[[Exception | None], None]]:
        """Switches to a session with an agent that has nothing yet. Returns the callbacks that waited for blobs."""
        with self._lock:
            coming, self._coming = self._coming, {}
            self._session = session
            self._trees = {""}
            self._blobs.clear()
            self._seen.clear()
        return [listener for listeners in coming.values() for listener in listeners]

    # ---- blobs

    def large(self, call: PackedCall, *, shared: bool) -> tuple[dict[int, str], dict[str, memoryview]]:
        """The buffers of a call that go to the store and not inline: their names by id, and their content by name.

        Of the arguments, these are buffers that are repeated or, for other workers to use them too, `shared`.
        """
        names: dict[int, str] = {}
        content: dict[str, memoryview] = {}
        for payload, fits in (
            (call.function.payload, _is_large),
            (call.arguments, lambda buffer: _is_large(buffer) and (self._is_repeated(buffer) or shared)),
        ):
            for buffer in payload.buffers:
                name = payload.refs.get(id(buffer))
                if name is not None or fits(buffer):
                    name = names[id(buffer)] = name or name_of(buffer)
                    content[name] = buffer
        return names, content

    def _is_repeated(self, buffer: memoryview) -> bool:
        """Whether a buffer may have been sent before, by a sample. The store then goes by the hash of all its content.

        Buffers that are sent for the first time go inline, with their call.
        """
        step = len(buffer) // 64
        sample = (len(buffer), b"".join(bytes(buffer[at : at + 16]) for at in range(0, len(buffer), step)))
        with self._lock:
            known = sample in self._seen
            self._seen[sample] = None
            self._seen.move_to_end(sample)
            if len(self._seen) > _SAMPLES:
                self._seen.popitem(last=False)
        return known

    def add(
        self, content: Mapping[str, Buffer], then: Callable[[], object], failure: Failure, *, keep: bool = False
    ) -> None:
        """Sends the blobs that the host lacks and that are not being sent already, then calls `then`.

        With `keep` they are files of the project, and the host has said that it lacks them.
        """
        with self._lock:
            waiting = dict.fromkeys(name for name in content if keep or name not in self._blobs)
            new = [name for name in waiting if name not in self._coming]

            def settled(name: str, error: Exception | None) -> None:
                if error is not None and waiting:
                    waiting.clear()
                    failure(error)
                elif name in waiting:
                    del waiting[name]
                    if not waiting:
                        try:
                            then()
                        except SkyfabError as lost:
                            failure(lost)

            there = not waiting
            for name in waiting:
                self._coming.setdefault(name, []).append(functools.partial(settled, name))
        for name in new:
            self.send(name, content[name], keep=keep)
        if there:
            then()

    def reserve(self, names: Iterable[str]) -> list[str]:
        """Those of the blobs that the host lacks and nobody sends. The caller sends them, and calls `arrived`."""
        with self._lock:
            new = [name for name in names if name not in self._blobs and name not in self._coming]
            self._coming.update((name, []) for name in new)
        return new

    def arrived(self, name: str, error: Exception | None, session: Session) -> None:
        """A blob that was sent in a session is there, or will not be."""
        with self._lock:
            if self._session is not session:  # `reset` has called the listeners
                return
            if error is None:
                self._blobs.add(name)
            listeners = self._coming.pop(name, [])
        for listener in listeners:
            listener(error)

    def forget(self, names: Iterable[str]) -> None:
        """The host no longer has these blobs. They are sent again with the next call."""
        with self._lock:
            self._blobs.difference_update(names)

    def send(self, name: str, content: Buffer, *, keep: bool = False) -> None:
        """Sends a blob that is reserved."""
        session = self._session

        def done(error: Exception | None) -> None:
            self.arrived(name, error, session)

        def answer(reply: messages.Message, _: list[memoryview]) -> None:
            failed = isinstance(reply, messages.Failed)
            done(HostUnfit(reply.text, host=self._host, hint=reply.hint) if failed else None)  # type: ignore[attr-defined]

        message = messages.Blob(name=name, parts=[len(content)], keep=keep)
        try:
            session.send(message, [content], answer=answer, failure=done)
        except SkyfabError as error:  # the host is lost: other calls may wait for this blob too
            done(error)

    def _store_now(self, content: Mapping[str, Buffer]) -> None:
        """Sends files of the project, and waits until the host has stored them. Raises HostLost and HostUnfit."""
        outcomes: list[Exception | None] = []
        self.add(content, lambda: outcomes.append(None), outcomes.append, keep=True)
        self._session.wait(lambda: bool(outcomes))
        if outcomes and outcomes[0] is not None:
            raise outcomes[0]

    # ---- the project

    def knows(self, tree: Tree) -> bool:
        return tree.digest in self._trees

    def sync(self, tree: Tree) -> bool:
        """Sends the project's files that the host lacks, and waits until the tree is laid out there.

        Returns False if a file has changed since the tree was read.
        """
        if tree.digest in self._trees:
            return True
        missing = self._session.ask(messages.Has(names=list(tree.sources)))
        if not isinstance(missing, messages.Missing):
            raise ProtocolError("not a reply to has", host=self._host)
        wanted = [name for name in missing.names if name in tree.sources]  # never send a file that was not offered
        content, held = dict[str, Buffer](), 0
        for name in wanted:
            found = tree.content(name)
            if found is None:
                return False
            content[name] = found
            held += len(found)
            if held > _HELD:
                self._store_now(content)
                content, held = {}, 0
        self._store_now(content)
        self._session.ask(messages.Tree(digest=tree.digest, files=[list(pair) for pair in tree.files]))
        self._trees.add(tree.digest)
        return True


def _is_large(buffer: memoryview) -> bool:
    return len(buffer) >= LARGE
