"""Answers the prompts of an ssh process, which has no terminal of its own (SSH_ASKPASS)."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

_CLIENT: Final = Path(__file__).with_name("askpass_client.py")
_LONGEST: Final = 55
"""Characters that a socket's name may have on every system, less those of its folder's name and of ssh's suffix."""

Answer = Callable[[str, Callable[[], bool]], "str | None"]
"""Answers a question, unless a function says that the answer is no longer wanted."""


class Askpass:
    """A socket in a folder of its own, and a thread that answers there, until `close`.

    The ssh processes for jump hosts inherit the variables. They ask one after another: each login needs the one before.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._closed = False
        self._folder = private_folder()
        program = self._folder / "ask"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(_CLIENT))} "$1"\n')
        program.chmod(0o700)
        self._socket = socket.socket(socket.AF_UNIX)
        self._path = str(self._folder / "socket")
        self._socket.bind(self._path)
        self._socket.listen()
        self.environ = {
            **os.environ,
            "SSH_ASKPASS": str(program),
            "SSH_ASKPASS_REQUIRE": "force",
            "SKYFAB_ASKPASS": self._path,
            "DISPLAY": os.environ.get("DISPLAY", ":0"),  # before 8.4, ssh asks by a program only if there is one
        }
        """The environment for ssh."""
        self._thread = threading.Thread(target=self._run, name="skyfab-askpass", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                if self._closed:
                    return
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            question = b""
            while not question.endswith(b"\0"):
                data = connection.recv(65536)
                if not data:
                    return
                question += data
            found = self._answer(os.fsdecode(question[:-1]), lambda: self._closed or _has_left(connection))
            if found is not None:
                connection.sendall(found.encode(errors="surrogateescape") + b"\n")
        except OSError:  # ssh was ended
            pass

    def close(self) -> None:
        """Ends the thread, also while it asks, and deletes the folder. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with socket.socket(socket.AF_UNIX) as last:  # wakes the thread
            last.connect(self._path)
            self._thread.join()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def private_folder() -> Path:
    """Makes a temporary folder whose name is short enough for a socket in it."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="skyfab-ssh-", dir=base if len(base) < _LONGEST else "/tmp"))


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side is gone. It sends nothing after its question."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(0))
