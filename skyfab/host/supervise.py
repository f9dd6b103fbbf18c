"""Runs a program on all ranks together: on GPUs that nobody else uses, as a server that is restarted, or both.

Rank 0 decides, over the rank channel, when the ranks take GPUs, start, stop and fail; all ranks report events to it.

The first rank of each host, its *leader*, takes the host's GPUs (skyfab.host.gpu_locks) when rank 0 asks it to. Rank 0
asks one leader after the other, in the order of the hosts' names, which is the same for all users: so two gangs that
want the same hosts do not wait for each other. When all have their GPUs, every rank joins the hold of its leader, and
starts the program: the GPUs are not free before all of these processes have ended. A program with
low priority gives way: it is stopped on all ranks, all GPUs are released, and all begin again. If a rank of a server
ends, all are stopped and started again; they keep their GPUs.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import signal
import socket
import sys
import threading
import time
import urllib.request

from skyfab import context
from skyfab.errors import CallCancelled, HostLost, HostUnfit, WorkerDied
from skyfab.host import command, phase
from skyfab.host.agent.host_info import how_it_ended
from skyfab.host.agent.processes import SUBREAPER, prctl
from skyfab.host.gpu_locks import REFUSE, Claim, visible
from skyfab.host.rank_channel import Channel, ChannelLost, Head

TYPE_CHECKING = False  # as in all modules that hosts import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Final

    Message = dict[str, Any]

PERFORM: Final = "SKYFAB_PERFORM"
_SCRIPT: Final = f"""
import json, os
from skyfab.calls.script import perform
perform(*json.loads(os.environ.pop("{PERFORM}")))
"""
_TICK: Final = 0.5
"""Seconds between checks of the program and of the queue."""
_JOIN: Final = 60.0
"""Seconds for all ranks to connect."""
_GRACE: Final = 10.0
"""Seconds from SIGTERM to SIGKILL before a restart."""
_CHECKPOINT: Final = 30.0
"""The same for a program that gives way."""
_STABLE: Final = 600.0
"""Once it has been ready for this many seconds, earlier restarts do not count."""
_LONGEST_PAUSE: Final = 30.0
_SETTLE: Final = 3.0
"""Seconds until the loss of a server's rank counts as a failure: if it is stopped, some hosts are stopped later."""
_TAIL: Final = 1024 * 1024
"""Bytes of recent output that are searched for a text."""


def supervise(words: Sequence[str], folder: str | None, settings: Message) -> int:
    """As `command.execute`, with `settings` as `GpuOptions.supervised` makes them. Without words: their "script".

    "gpus" (or None): how many of each host it takes ("count", None for all), if it waits for them ("wait"), and with
    "low" priority. "server" (or None): it is restarted when a rank ends, "restarts" times, and also if it is not ready
    after "timeout" seconds; "ready" is a URL or port of rank 0's host, or a text in rank 0's output; "port" must be
    free there. Raises HostUnfit if GPUs are in use and it does not wait, WorkerDied, and HostLost if ranks are missing.
    """
    info = context.instance_info()
    secret = bytes.fromhex(settings["secret"])
    with contextlib.ExitStack() as over, contextlib.ExitStack() as failed:  # unless the program ends by itself
        over.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        rank = _Rank(list(words) or [sys.executable, "-u", "-c", _SCRIPT], folder, settings)
        failed.callback(rank.stop, _GRACE)
        if info.is_head:
            coordinator = _Coordinator(settings, rank)
            listener = socket.socket(fileno=context.take_listener())
            head = Head(listener, secret, coordinator.note, lambda rank: coordinator.note(rank, {"op": "gone"}))
            failed.callback(head.close)
            threading.Thread(target=coordinator.run, args=(head,), daemon=True).start()
        try:
            channel = Channel.connect(info.head_addr, info.head_port, secret, info.rank)
            failed.callback(channel.close)
            code = rank.run(channel)
        except ChannelLost as error:
            if settings["server"] is None:
                raise HostLost(f"while it waited for GPUs: {error}", rank=info.rank) from None
            rank.stop(_GRACE)
            time.sleep(_SETTLE)
            raise WorkerDied("rank 0 is gone: its process has ended, or its host is lost", rank=info.rank) from None
        failed.pop_all()
    if code:
        name = words[0] if words else settings["run"]
        raise WorkerDied(f"{name} {how_it_ended(code)}", exitcode=code, rank=info.rank)
    return code


class _Rank:
    """One rank: does what rank 0 asks for. It keeps its GPUs until its process ends, with the other ranks."""

    _channel: Channel

    def __init__(self, words: list[str], folder: str | None, settings: Message) -> None:
        self._words = words
        self._folder = folder
        self._settings = settings
        self._gpus: Message = settings["gpus"] or {}
        self._claim: Claim | None = None
        self._is_leader = context.instance_info().local_rank == 0
        self._refuse_at = 0.0
        self._said = ""
        self._program: command.Program | None = None
        self._code: int | None = None
        """The exit code of the program, once it was reported."""
        self.error: Exception | None = None
        """Why the run fails, if that is because of this rank."""
        self._is_ending = self._is_stopped = self._is_done = False
        prctl(SUBREAPER, 1)  # what a program leaves running when it is stopped becomes our child
        # The agent sends SIGTERM to the whole process group: this process must not end before the program does.
        signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, *_: object) -> None:
        """SIGTERM was sent to this process group, by `stop`, or by the agent to stop the run."""
        self._is_stopped = self._is_stopped or not self._is_ending

    def run(self, channel: Channel) -> int:
        """The exit code of the program."""
        self._channel = channel
        is_server = self._settings["server"] is not None
        info = context.instance_info()
        where = {"node": info.node, "local": info.local_rank, "host": [os.uname().nodename, info.peers[info.node]]}
        try:
            channel.send({"op": "arrived", **where})
            while not self._is_done:
                message = channel.receive(_TICK)
                code = None if self._program is None else self._program.poll()
                if self._is_stopped and (is_server or self._program is None):
                    raise WorkerDied("it was stopped", rank=info.rank)
                self._step(message, has_ended=code is not None)
                if code is not None and self._program is not None and self._code is None:
                    self._code = code
                    channel.send({"op": "ended", "text": f"{self._words[0]} {how_it_ended(code)}"})
        except ChannelLost:
            if self._program is None or is_server:
                raise
            return self._program.wait()  # it runs without rank 0, if it can
        assert self._code is not None
        return self._code

    def _step(self, message: Message | None, *, has_ended: bool) -> None:
        """Follows a message. Without one looks whether the run gives way, unless its program has ended."""
        try:
            if message is not None:
                getattr(self, f"_on_{message['op']}")(message)
            elif self._claim is not None and self.error is None and not has_ended:
                self._look(self._claim)
        except HostUnfit as error:
            if self.error is not None:
                raise
            error.rank = context.instance_info().rank
            self.error = error
            self._channel.send({"op": "failed"})

    def _on_take(self, message: Message) -> None:
        gpus = visible(os.environ, context.instance_info().accelerators)
        count = self._gpus["count"] or len(gpus)
        if not 0 < count <= len(gpus):
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            hint = None if named is None else f"CUDA_VISIBLE_DEVICES is {named[:80]!r}: only GPUs named by number count"
            raise command.unfit(f"it has {len(gpus)} GPUs, but the run needs {max(1, count)}", hint=hint)
        self._claim = Claim(count, gpus, self._settings["run"], low=self._gpus["low"], waits=self._gpus["wait"])
        self._refuse_at = time.monotonic() + REFUSE
        self._look(self._claim)

    def _look(self, claim: Claim) -> None:
        """At most twice a second."""
        if claim.gpus:
            if self._gpus["low"] and self._is_leader and claim.should_give_way():
                self._channel.send({"op": "give_way"})
        elif claim.try_take():
            self._channel.send({"op": "taken", "gpus": claim.gpus, "hold": claim.hold, "warning": claim.warning})
        elif not self._gpus["wait"]:
            if time.monotonic() > self._refuse_at:
                few = f"--where='gpus.free >= {self._gpus['count'] or 1}' --nodes=1"
                hint = f"to wait for them: --when-free; for any host that has them: {few}"
                raise command.unfit(f"not enough free GPUs: {claim.refusal}", hint=hint)
        elif claim.reason != self._said:
            self._said = claim.reason
            self._channel.send({"op": "waits", "reason": claim.reason})

    def _on_start(self, message: Message) -> None:
        env: dict[str, str] = {}
        if message["taken"] is not None:
            gpus = message["taken"]["gpus"]
            if self._claim is None:
                self._claim = Claim(len(gpus), gpus, self._settings["run"], low=self._gpus["low"])
                if not self._claim.join(message["taken"]["hold"]):
                    raise WorkerDied("the first rank of this host, which held its GPUs, is gone")
            env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        if self._settings["script"] is not None:
            env[PERFORM] = self._settings["script"]
        fds = () if self._claim is None else self._claim.fds
        self._program = command.start(self._words, port=message["port"], env=env, cwd=self._folder, pass_fds=fds)

    def _on_stop(self, message: Message) -> None:
        self.stop(message["grace"], is_over=message["gives_way"])
        self._channel.send({"op": "stopped"})

    def _on_done(self, message: Message) -> None:
        self._is_done = True

    def _on_fail(self, message: Message) -> None:
        if self.error is not None and message["rank"] == context.instance_info().rank:
            raise self.error
        raise CallCancelled(f"rank {message['rank']} has failed")

    def stop(self, grace: float, *, is_over: bool = True) -> None:
        """Ends the program and all that it started: SIGTERM, SIGKILL after `grace`. If `is_over`, releases GPUs."""
        self._is_ending = True
        program, self._program = self._program, None
        if program is not None:
            command.end(program, grace)
        self._code = None
        self._is_ending = False
        if is_over and self._claim is not None:
            self._claim.release()
            self._claim = None
            self._said = ""


class _RankFailed(Exception):
    """A rank, whose number is the argument, has failed: it raises the reason itself."""


class _Coordinator:
    """Rank 0's part, on its own thread, which continues after rank 0's program has ended."""

    _head: Head

    def __init__(self, settings: Message, rank: _Rank) -> None:
        self._rank = rank
        self._events: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._server: Message | None = settings["server"]
        self._claims = settings["gpus"] is not None
        self._ranks: dict[int, Message] = {}
        self._taken: dict[int, Message] = {}
        """The GPUs of each node, as its leader has reported them."""
        self._running: set[int] = set()
        self._used = 0
        """Restarts that count."""
        self._said = ""

    def note(self, rank: int, message: Message) -> None:
        self._events.put((rank, message))

    def run(self, head: Head) -> None:
        self._head = head
        try:
            self._gather()
            while True:
                if self._take():
                    while why := self._start():
                        self._restart(why)
                self._stop(_CHECKPOINT, gives_way=True)
        except _RankFailed as failed:
            head.push({"op": "fail", "rank": failed.args[0]})
        except Exception as error:
            self._rank.error = error
            head.push({"op": "fail", "rank": 0})

    def _next(self, timeout: float | None = None) -> tuple[int, Message]:
        """The next report of a rank. Raises queue.Empty; _RankFailed; WorkerDied or HostLost if a rank is missing."""
        rank, message = self._events.get(timeout=timeout)
        if message["op"] == "failed":
            raise _RankFailed(rank)
        if message["op"] == "gone" and self._server is not None:
            time.sleep(_SETTLE)
            raise WorkerDied(f"rank {rank} is gone: its process has ended, or its host is lost", rank=0)
        if message["op"] == "gone" and not self._running:
            raise HostLost(f"while it waited for GPUs: rank {rank} is gone", rank=0)
        return rank, message

    def _gather(self) -> None:
        self._enter_starting()
        until = time.monotonic() + _JOIN
        while missing := set(range(context.instance_info().world_size)).difference(self._ranks):
            try:
                rank, message = self._next(max(0.0, until - time.monotonic()))
            except queue.Empty:
                text = f"rank {min(missing)} did not connect to rank 0 within {_JOIN:.0f} s"
                raise WorkerDied(text, rank=0) from None
            self._ranks[rank] = message

    def _enter_starting(self) -> None:
        if self._server is None:
            phase.leave()
        else:
            phase.enter("starting")

    def _take(self) -> bool:
        """Waits until all leaders have their GPUs; False if one must give way."""
        leaders = [rank for rank, about in self._ranks.items() if about["local"] == 0 and self._claims]
        for leader in sorted(leaders, key=lambda rank: (self._ranks[rank]["host"], rank)):
            self._head.push({"op": "take"}, leader)
            message: Message = {"op": "take"}
            while message["op"] != "taken":
                rank, message = self._next()
                if message["op"] == "give_way":
                    self._say_giving_way(rank)
                    return False
                if message["op"] == "waits":
                    self._say_waiting(message["reason"])
            self._taken[self._ranks[leader]["node"]] = message
            if message["warning"]:
                text = f"{message['warning']}: programs that use GPUs without skyfab are not detected"
                print(f"{self._ranks[leader]['host'][0]}: {text}", file=sys.stderr, flush=True)
        self._enter_starting()
        return True

    def _say_waiting(self, reason: str) -> None:
        phase.enter("waiting", reason)
        if phase.without_times(reason) != self._said:
            self._said = phase.without_times(reason)
            print(f"waiting for GPUs: {reason}", file=sys.stderr, flush=True)

    def _start(self) -> str:
        """Starts all ranks. Returns why they must be restarted; empty if they must give way."""
        ready = None if self._server is None else _Readiness(self._server)
        port = _free_port()
        for rank, about in self._ranks.items():
            self._head.push({"op": "start", "port": port, "taken": self._taken.get(about["node"])}, rank)
        self._running = set(self._ranks)
        while True:
            with contextlib.suppress(queue.Empty):
                rank, message = self._next(None if ready is None else _TICK)
                if message["op"] == "give_way" and len(self._running) == len(self._ranks):  # else all will end
                    self._say_giving_way(rank)
                    return ""
                if message["op"] == "ended" and ready is not None:
                    return f"rank {rank}: {message['text']}"
                if message["op"] in ("ended", "gone"):
                    self._running.discard(rank)
                    self._head.push({"op": "done"}, rank)
            if ready is not None:
                if why := ready.look():
                    return why
                self._used = 0 if ready.is_stable else self._used

    def _say_giving_way(self, rank: int) -> None:
        phase.enter("giving way", f"to a run of normal priority on {self._ranks[rank]['host'][0]}")
        print("giving way to a run of normal priority", file=sys.stderr, flush=True)

    def _restart(self, why: str) -> None:
        """Stops all ranks. Raises WorkerDied if there were too many restarts."""
        assert self._server is not None
        if self._used >= self._server["restarts"]:
            raise WorkerDied(f"{why} (restarts: {self._used})", rank=0)
        self._used += 1
        phase.enter("restarting", f"{why}; restart {self._used} of {self._server['restarts']}")
        self._stop(_GRACE, gives_way=False)
        time.sleep(min(2.0**self._used / 2, _LONGEST_PAUSE))

    def _stop(self, grace: float, *, gives_way: bool) -> None:
        self._running.clear()
        self._head.push({"op": "stop", "grace": grace, "gives_way": gives_way})
        waiting = set(self._ranks)
        while waiting:
            rank, message = self._next()
            if message["op"] == "stopped":
                waiting.discard(rank)


class _Readiness:
    """Whether a server that is being started is ready."""

    def __init__(self, server: Message) -> None:
        """Raises HostUnfit if another program uses its port."""
        _free_port(server["port"])
        self._ready: str = server["ready"]
        self._timeout: float = server["timeout"]
        self._is_url = self._ready.startswith(("http://", "https://"))
        paths = [f"{context.run_folder()}/logs/0.{end}" for end in ("out", "err")]
        self._logs = {path: os.path.getsize(path) if os.path.exists(path) else 0 for path in paths}
        self._began = time.monotonic()
        self._since: float | None = None

    @property
    def is_stable(self) -> bool:
        return self._since is not None and time.monotonic() > self._since + _STABLE

    def look(self) -> str:
        """Returns why it must be restarted; empty unless it was not ready in time."""
        if self._since is not None:
            return ""
        if self._is_ready():
            self._since = time.monotonic()
            phase.enter("ready")
        elif time.monotonic() > self._began + self._timeout:
            what = f"{'port ' * self._ready.isdigit()}{self._ready} does not respond on its host"
            if not self._ready.isdigit() and not self._is_url:
                what = f"rank 0 has not printed {self._ready!r}"
            return f"it was not ready after {self._timeout:.0f} s: {what}"
        return ""

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            if self._ready.isdigit():
                socket.create_connection(("127.0.0.1", int(self._ready)), 4 * _TICK).close()
                return True
            if self._is_url:
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                opener.open(self._ready, timeout=4 * _TICK).close()
                return True
            for path, size in self._logs.items():
                with open(path, "rb") as file:
                    end = file.seek(0, os.SEEK_END)
                    file.seek(max(size if size <= end else 0, end - _TAIL))  # else it has been rotated
                    if self._ready.encode() in file.read(_TAIL):
                        return True
        return not self._ready


def _free_port(port: int = 0) -> int:
    """Returns the port, for 0 any that is free. Raises HostUnfit if another program uses it."""
    try:
        with socket.create_server(("", port)) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        hint = "another program may use it, such as an earlier server (skyfab runs): end it, or choose another port"
        why = f"port {port} is not free: {os.strerror(error.errno or 0)}"
        raise command.unfit(why, rank=0, hint=hint) from None
