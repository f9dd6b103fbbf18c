"""Starts the programs of contestants, with a time limit. What they leave running is ended, by pid."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.peers.session import READY


class Failed(Exception):
    """A contestant did not do a job; the text says why."""


def run(argv: Sequence[str], *, limit: float, cwd: Path, env: Mapping[str, str]) -> tuple[float, str]:
    """Runs a program; returns its seconds and its output. Raises Failed."""
    with _Child(argv, cwd=cwd, env=env) as child:
        output, _ = child.communicate(limit)
        taken = time.perf_counter() - child.started
        if child.process.returncode:
            raise Failed(f"exit code {child.process.returncode}: {child.last_words()}")
        return taken, output


class Session:
    """A program that is connected, and does one warm job after another."""

    def __init__(self, argv: Sequence[str], *, limit: float, cwd: Path, env: Mapping[str, str]) -> None:
        """Returns when it is ready. Raises Failed."""
        self._child = _Child(argv, cwd=cwd, env=env)
        self._failed = False
        try:
            if self._child.line(limit, "connect") != READY:
                raise Failed(self._child.last_words())
        except BaseException:
            self._child.end()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.end(grace=0 if self._failed else 20)

    def seconds(self, job: str, *, limit: float) -> float:
        """Raises Failed; a session that failed at last is killed, and not waited for."""
        self._failed = True
        self._child.say(job)
        answer = json.loads(self._child.line(limit, "finish"))
        if "error" in answer:
            raise Failed(answer["error"].partition("\n")[0])
        self._failed = False
        return float(answer["seconds"])


class _Child:
    """A process in a process group of its own, with its errors in a file."""

    def __init__(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self.started = time.perf_counter()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, start_new_session=True
        )

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def communicate(self, limit: float) -> tuple[str, str]:
        try:
            return self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise Failed(_too_long("finish", limit)) from None

    def say(self, line: str) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except OSError:
            raise Failed(f"it ended: {self.last_words()}") from None

    def line(self, limit: float, what: str) -> str:
        """The next line of its output. Raises Failed if none comes in time."""
        assert self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(limit):
                raise Failed(_too_long(what, limit))
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"it ended: {self.last_words()}")
        return line.strip()

    def last_words(self) -> str:
        """The line of its errors that says most: the last one that names an exception, or the last one."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
        return (named or lines or ["without a word"])[-1][:200]

    def end(self, grace: float = 0) -> None:
        """Closes its input, waits for its end, and kills what is left of its process group."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.close()
        except OSError:
            pass  # it is gone, and did not read the last line
        if grace:
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdout.close()
        self._errors.close()


def _too_long(what: str, limit: float) -> str:
    return f"did not {what} in {limit:g} s"
