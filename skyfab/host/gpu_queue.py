"""Runs a program on GPUs that nobody else uses: waits for them, or fails if they are in use. Runs in each rank.

The first rank of each host, its *leader*, takes the host's GPUs (skyfab.host.gpu_locks) when rank 0 asks it to. Rank 0
asks one leader after the other, in the order of the hosts' names, which is the same for all users: so two gangs that
want the same hosts do not wait for each other. When all have their GPUs, every rank starts the program. A program with
low priority gives way: it is stopped on all ranks, all GPUs are released, and all begin again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time

from skyfab import context
from skyfab.errors import CallCancelled, HostLost, WorkerDied
from skyfab.host import command, phase
from skyfab.host.agent.zygote import SUBREAPER, prctl
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
_POLL: Final = 0.5
"""Seconds from one look at the queue to the next."""
_GRACE: Final = 30.0
"""Seconds that a program has for a checkpoint after SIGTERM."""


def execute(words: Sequence[str], folder: str | None, policy: Message) -> int:
    """As `command.execute`, on `policy["count"]` GPUs of each host. Without words: the script in `policy["script"]`.

    Raises HostUnfit if GPUs are in use and it does not wait, WorkerDied, and HostLost if the gang is not complete.
    """
    info = context.instance_info()
    secret = bytes.fromhex(policy["secret"])
    with contextlib.ExitStack() as failed:  # what to do unless the program has ended by itself
        if info.rank == 0:
            queue = _Queue(info.world_size)
            queue.head = Head(socket.socket(fileno=context.take_listener()), secret, queue.handle, queue.gone)
            failed.callback(queue.head.close)
        try:
            channel = Channel.connect(info.head_addr, info.head_port, secret, info.rank)
            failed.callback(channel.close)
            rank = _Rank(channel, list(words) or [sys.executable, "-u", "-c", _SCRIPT], folder, policy)
            failed.callback(rank.stop, 0.0)
            code = rank.run()
        except ChannelLost as error:
            raise HostLost(f"while it waited for GPUs: {error}", rank=info.rank) from None
        failed.pop_all()
    if code:
        name = words[0] if words else policy["run"]
        raise WorkerDied(f"{name} {command.how_it_ended(code)}", exitcode=code, rank=info.rank)
    return code


class _Rank:
    """One rank: does what rank 0 asks for. A leader keeps its hold until its process ends, with the other ranks."""

    def __init__(self, channel: Channel, words: list[str], folder: str | None, policy: Message) -> None:
        self._channel = channel
        self._words = words
        self._folder = folder
        self._policy = policy
        self._claim: Claim | None = None
        self._refuse_at = 0.0
        self._program: command.Program | None = None
        self._said = ""
        prctl(SUBREAPER, 1)  # what a program leaves running when it is stopped becomes our child

    def run(self) -> int:
        """The exit code of the program."""
        info = context.instance_info()
        where = {"node": info.node, "local": info.local_rank, "host": [os.uname().nodename, info.peers[info.node]]}
        self._channel.request({"op": "arrived", **where})
        while True:
            try:
                message = self._channel.pushed(_POLL)
                if message is not None:
                    getattr(self, f"_on_{message['op']}")(message)
                elif self._claim is not None:
                    self._look(self._claim)
            except ChannelLost:
                if self._program is None:
                    raise
                return self._program.wait()  # it runs without rank 0, if it can
            code = None if self._program is None else self._program.poll()
            if code is not None and not self._begins_again():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                return code

    def _begins_again(self) -> bool:
        """Whether the program, which has ended, was stopped to give way."""
        with contextlib.suppress(ChannelLost):
            return "again" in self._channel.request({"op": "ended"})
        return False

    def _on_take(self, message: Message) -> None:
        gpus = visible(os.environ, context.instance_info().accelerators)
        count = self._policy["count"] or len(gpus)
        if not 0 < count <= len(gpus):
            raise command.unfit(f"it has {len(gpus)} GPUs, but the run needs {max(1, count)}", rank=0)
        low, waits = self._policy["low"], self._policy["wait"]
        self._claim = Claim(count, gpus, self._policy["run"], low=low, waits=waits)
        self._refuse_at = time.monotonic() + REFUSE
        self._look(self._claim)

    def _look(self, claim: Claim) -> None:
        """At most twice a second."""
        if claim.gpus:
            if self._policy["low"] and claim.should_give_way():
                self._channel.request({"op": "give_way"})
        elif claim.try_take():
            self._channel.request({"op": "taken", "gpus": claim.gpus, "warning": claim.warning})
        elif not self._policy["wait"]:
            if time.monotonic() > self._refuse_at:
                self._channel.request({"op": "refused", "reason": claim.refusal})
        elif claim.reason != self._said:
            self._said = claim.reason
            self._channel.request({"op": "waits", "reason": claim.reason})

    def _on_start(self, message: Message) -> None:
        env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, message["gpus"])), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if "script" in self._policy:
            env[PERFORM] = self._policy["script"]
        # The agent sends SIGTERM to the whole process group: this process must not end before the program does.
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._program = command.start(self._words, port=message["port"], env=env, cwd=self._folder)

    def _on_stop(self, message: Message) -> None:
        self.stop(_GRACE)
        self._channel.request({"op": "stopped"})

    def _on_fail(self, message: Message) -> None:
        if "lost" in message:
            raise ChannelLost(f"rank {message['lost']} has gone")
        if message["rank"] != context.instance_info().rank:
            raise CallCancelled("another host has not enough free GPUs")
        few = f"--where='gpus.free >= {self._policy['count'] or 1}' --nodes=1"
        hint = f"to wait for them: --when-free; for any host that has them: {few}"
        raise command.unfit(f"not enough free GPUs: {message['reason']}", hint=hint)

    def stop(self, grace: float) -> None:
        """Ends the program, after SIGTERM and a grace if there is one, and releases the GPUs."""
        program, self._program = self._program, None
        if program is not None:
            command.end(program, grace)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._claim is not None:
            self._claim.release()
        self._claim = None
        self._said = ""


class _Queue:
    """Rank 0's part, on the threads of its channel: also after its own program has ended."""

    head: Head

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._ranks: dict[int, Message] = {}
        self._waiting: list[int] = []
        """The leaders that do not have their GPUs yet, in their order; the first one is about to take them."""
        self._gpus: dict[int, list[int]] = {}
        """By node."""
        self._state = "gathering"
        self._still_running: set[int] = set()
        self._said = ""

    def handle(self, rank: int, message: Message) -> Message:
        with self._lock:
            reply: Message | None = getattr(self, f"_on_{message['op']}")(rank, message)
        return reply or {}

    def gone(self, rank: int) -> None:
        with self._lock:
            self._still_running.discard(rank)
            if self._state != "running":
                self._state = "gone"
                self.head.push({"op": "fail", "lost": rank})

    def _on_arrived(self, rank: int, message: Message) -> None:
        self._ranks[rank] = message
        if len(self._ranks) == self._world_size:
            self._begin()

    def _begin(self) -> None:
        leaders = [rank for rank, about in self._ranks.items() if about["local"] == 0]
        self._waiting = sorted(leaders, key=lambda rank: (self._ranks[rank]["host"], rank))
        self._gpus.clear()
        self._state = "taking"
        self.head.push({"op": "take"}, self._waiting[0])

    def _on_waits(self, rank: int, message: Message) -> None:
        phase.enter("waiting", message["reason"])
        said = re.sub(r", [^,()]* so far", "", message["reason"])
        if said != self._said:
            self._said = said
            print(f"waiting for GPUs: {message['reason']}", file=sys.stderr, flush=True)

    def _on_taken(self, rank: int, message: Message) -> None:
        if self._state != "taking":
            return
        self._gpus[self._ranks[rank]["node"]] = message["gpus"]
        if message["warning"]:
            text = f"{message['warning']}: programs that use GPUs without skyfab are not seen"
            print(f"{self._ranks[rank]['host'][0]}: {text}", file=sys.stderr, flush=True)
        self._waiting.remove(rank)
        if self._waiting:
            self.head.push({"op": "take"}, self._waiting[0])
            return
        self._state = "running"
        self._still_running = set(self._ranks)
        phase.leave()
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        for one, about in self._ranks.items():
            self.head.push({"op": "start", "port": port, "gpus": self._gpus[about["node"]]}, one)

    def _on_refused(self, rank: int, message: Message) -> None:
        self._state = "refused"
        self.head.push({"op": "fail", "reason": message["reason"], "rank": rank})

    def _on_give_way(self, rank: int, message: Message) -> None:
        """Not if a program has ended: the others will too."""
        if self._state == "taking" or (self._state == "running" and len(self._still_running) == self._world_size):
            self._state = "giving way"
            self._still_running = set(self._ranks)
            phase.enter("giving way", f"to a run of normal priority on {self._ranks[rank]['host'][0]}")
            print("giving way to a run of normal priority", file=sys.stderr, flush=True)
            self.head.push({"op": "stop"})

    def _on_stopped(self, rank: int, message: Message) -> None:
        self._still_running.discard(rank)
        if not self._still_running:
            self._begin()

    def _on_ended(self, rank: int, message: Message) -> Message | None:
        if self._state == "giving way":
            return {"again": True}
        self._still_running.discard(rank)
        return None
