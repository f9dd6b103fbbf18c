"""A server of all ranks: starts a program on each, finds out when it is ready, and restarts all of them together.

Rank 0 decides, over the rank channel: it sends `start`, `stop` and `fail` to all ranks, which report what happens.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import signal
import socket
import threading
import time
import urllib.request

from skyfab import context
from skyfab.errors import HostUnfit, WorkerDied
from skyfab.host import phase
from skyfab.host.agent.zygote import SUBREAPER, end_children, prctl
from skyfab.host.command import end, how_it_ended, start, unfit
from skyfab.host.rank_channel import Channel, ChannelLost, Head

TYPE_CHECKING = False  # as in all modules that hosts import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from skyfab.host.command import Program
    from skyfab.host.rank_channel import Message

_TICK = 0.5
_JOIN = 60.0
"""Seconds for all ranks to connect."""
_GRACE = 10.0
"""Seconds from SIGTERM to SIGKILL before a restart."""
_STABLE = 600.0
"""Once it has been ready for this many seconds, earlier restarts do not count."""
_LONGEST_PAUSE = 30.0
_SETTLE = 3.0
"""Seconds until the loss of another rank counts as a failure: if the run is stopped, its hosts are not at once."""
_TAIL = 1024 * 1024
"""Bytes of recent output that are searched for a text."""


def serve(
    words: Sequence[str], folder: str | None, secret: bytes, ready: str, port: int, restarts: int, timeout: float
) -> None:
    """Runs the program of this rank until the run is stopped. Raises WorkerDied or HostUnfit when all ranks give up.

    `ready` is a URL or port of rank 0's host, or a text in rank 0's output; `port` must be free there. If it is not
    ready within `timeout` seconds, that counts as a failure.
    """
    info = context.instance_info()
    if info.is_head:
        coordinator = _Coordinator(ready, port, restarts, timeout)
        listener = socket.socket(fileno=context.take_listener())
        head = Head(listener, secret, coordinator.note, lambda rank: coordinator.events.put((rank, {"op": "gone"})))
        threading.Thread(target=coordinator.run, args=(head,), daemon=True).start()
    server = _Rank(words, folder)
    try:
        server.run(Channel.connect(info.head_addr, info.head_port, secret, info.rank))
    except ChannelLost:
        server.end()
        time.sleep(_SETTLE)
        raise WorkerDied("rank 0 has gone: its process has ended, or its host is lost", rank=info.rank) from None
    finally:
        server.end()


class _Rank:
    """The program of this rank."""

    def __init__(self, words: Sequence[str], folder: str | None) -> None:
        self._words = words
        self._folder = folder
        self._process: Program | None = None
        self._is_ending = self._is_stopped = False
        prctl(SUBREAPER, 1)  # what a killed program leaves running becomes our child
        signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, *_: object) -> None:
        """SIGTERM was sent to this process group, by `end`, or by the agent to stop the run."""
        self._is_stopped = self._is_stopped or not self._is_ending

    def run(self, channel: Channel) -> NoReturn:
        while True:
            message = channel.pushed(_TICK) or {}
            code = self._process.poll() if self._process is not None else None
            if self._is_stopped:
                raise WorkerDied("it was stopped")
            if "fail" in message:
                kind = unfit if message["unfit"] else WorkerDied
                raise kind(message["fail"], rank=context.instance_info().rank, hint=message["hint"])
            if "start" in message:
                try:
                    self._process = start(self._words, port=message["port"], cwd=self._folder)
                except HostUnfit as error:
                    channel.request({"op": "unfit", "text": error.message, "hint": error.hint})
            elif "stop" in message:
                self.end()
                channel.request({"op": "stopped"})
            elif code is not None:
                self._process = None
                channel.request({"op": "ended", "text": f"{self._words[0]} {how_it_ended(code)}"})

    def end(self) -> None:
        """Ends the program and all that it has started."""
        self._is_ending = True
        process, self._process = self._process, None
        if process is not None:
            end(process, _GRACE)
        end_children()
        self._is_ending = False


class _Coordinator:
    """Decides, on rank 0, when the ranks start, stop and give up."""

    def __init__(self, ready: str, port: int, restarts: int, timeout: float) -> None:
        self.events: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._ready = ready
        self._port = port
        self._restarts = restarts
        self._timeout = timeout
        self._used = 0
        """Restarts that count."""

    def note(self, rank: int, message: Message) -> Message:
        self.events.put((rank, message))
        return {}

    def run(self, head: Head) -> None:
        try:
            phase.enter("starting")
            until = time.monotonic() + _JOIN
            while missing := set(range(context.instance_info().world_size)) - head.ranks:
                if time.monotonic() > until:
                    raise WorkerDied(f"rank {min(missing)} did not connect to rank 0 within {_JOIN:.0f} s")
                time.sleep(_TICK / 10)
            while True:
                self._restart(head, self._serve(head))
        except Exception as error:
            unfit, hint = isinstance(error, HostUnfit), getattr(error, "hint", None)
            head.push({"fail": getattr(error, "message", repr(error)), "unfit": unfit, "hint": hint})

    def _serve(self, head: Head) -> str:
        """Starts all ranks. Returns why they must be restarted; raises HostUnfit if that would not help."""
        _check_free(self._port)
        paths = [f"{context.run_folder()}/logs/0.{end}" for end in ("out", "err")]
        logs = {path: os.path.getsize(path) if os.path.exists(path) else 0 for path in paths}
        head.push({"start": True, "port": _check_free(0)})
        began, since = time.monotonic(), None
        while True:
            with contextlib.suppress(queue.Empty):
                return _ended(*self.events.get(timeout=_TICK))
            now = time.monotonic()
            if since is not None:
                self._used = 0 if now > since + _STABLE else self._used
            elif _is_ready(self._ready, logs):
                since = now
                phase.enter("ready")
            elif now > began + self._timeout:
                what = f"{'port ' * self._ready.isdigit()}{self._ready} does not respond on its host"
                if not self._ready.isdigit() and not _is_url(self._ready):
                    what = f"rank 0 has not printed {self._ready!r}"
                return f"it was not ready after {self._timeout:.0f} s: {what}"

    def _restart(self, head: Head, why: str) -> None:
        """Stops all ranks. Raises WorkerDied if there were too many restarts."""
        if self._used >= self._restarts:
            raise WorkerDied(f"{why} (restarts: {self._used})")
        self._used += 1
        phase.enter("restarting", f"{why}; restart {self._used} of {self._restarts}")
        head.push({"stop": True})
        waiting = head.ranks
        while waiting:
            rank, message = self.events.get()
            if message["op"] == "stopped":
                waiting.discard(rank)
            else:
                _ended(rank, message)
        time.sleep(min(2.0**self._used / 2, _LONGEST_PAUSE))


def _ended(rank: int, message: Message) -> str:
    """What a rank has reported, as the reason of a restart. Raises HostUnfit or WorkerDied if that would not help."""
    if message["op"] == "gone":
        time.sleep(_SETTLE)
        raise WorkerDied(f"rank {rank} has gone: its process has ended, or its host is lost")
    if message["op"] == "unfit":
        raise HostUnfit(f"rank {rank}: {message['text']}", hint=message["hint"])
    return f"rank {rank}: {message['text']}"


def _check_free(port: int) -> int:
    """Returns the port, for 0 any that is free. Raises HostUnfit if another program uses it."""
    try:
        with socket.create_server(("", port)) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        hint = "another program may use it, such as an earlier server (skyfab runs): end it, or choose another port"
        raise HostUnfit(
            f"port {port} of rank 0's host is not free: {os.strerror(error.errno or 0)}", hint=hint
        ) from None


def _is_url(ready: str) -> bool:
    return ready.startswith(("http://", "https://"))


def _is_ready(ready: str, logs: dict[str, int]) -> bool:
    if not ready:
        return True
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        if ready.isdigit():
            socket.create_connection(("127.0.0.1", int(ready)), 4 * _TICK).close()
            return True
        if _is_url(ready):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            opener.open(ready, timeout=4 * _TICK).close()
            return True
        for path, size in logs.items():
            with open(path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(min(size, end), end - _TAIL))  # it may have been rotated
                if ready.encode() in file.read(_TAIL):
                    return True
    return False
