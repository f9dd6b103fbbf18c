"""A sweep on its hosts: rank 0 holds the list of trials; a driver on each host runs them, each as a separate process.

Every driver records in ``trials.RANK`` in the folder of the run what happens to trials: first a line of JSON for each
trial, then one for each step. Rank 0 also records which rank gets a trial before it assigns it. So no trial begins
twice, and it is known which have begun, whatever is lost. A rank reconnects if needed, and reports its trials.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time

from skyfab import context
from skyfab.errors import SkyfabError
from skyfab.host import phase
from skyfab.host.agent.host_info import how_it_ended
from skyfab.host.agent.processes import SUBREAPER, end_strays, has_variable, prctl
from skyfab.host.ask.runs import end_of_log
from skyfab.host.command import start
from skyfab.host.gpu_locks import Claim, look
from skyfab.host.rank_channel import Channel, Head
from skyfab.host.trial import REPORT, reported

TYPE_CHECKING = False  # as in all modules that hosts import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Trial = dict[str, Any]
    """As `detached/sweep.py` reads it."""

_RETURN = 40.0
"""Seconds for a rank to reconnect: more than it takes to notice that a connection is broken."""
_LOOK = 5.0
"""Seconds between reads of the reports of running trials."""
_REPORT = "report.json"
_OF_A_RANK = re.compile(
    "MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|NODE_RANK|ROLE_NAME|TORCHELASTIC_.*", re.DOTALL
)
"""Names of variables that a trial must not have, because it is not a rank: those of `pool.broadcast.rank_env`."""

_LIMITED = """
import runpy, sys
from skyfab.host.agent.cuda import limit_memory
limit_memory(sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script with a limit on its GPU memory."""


class TrialList:
    """Rank 0's list: which trials are waiting, and which rank has which."""

    def __init__(
        self, waiting: Sequence[int], slots: Sequence[Any], note: Callable[[Trial], None], *, keep_going: bool
    ) -> None:
        self._waiting = list(reversed(waiting))
        self._held: dict[int, set[int]] = {rank: set() for rank in range(len(slots))}
        self._note = note
        self._keep_going = keep_going
        self._lock = threading.Lock()
        self.expected = {rank for rank, found in enumerate(slots) if found}
        """Ranks that may ask again."""
        self.states: list[str] = []
        """The states of trials that have ended."""

    def handle(self, rank: int, message: dict[str, Any]) -> dict[str, Any]:
        """A rank reports a trial that has `ended`, if any, and those that it has, and gets one: 0 if it `waits`."""
        with self._lock:
            held, ended = self._held[rank], message["ended"]
            if ended is not None and ended["trial"] in held:  # else the reply was lost, and it reports again
                held.remove(ended["trial"])
                self.states.append(ended["state"])
                self._note(ended)
            missed = sorted(held.difference(message["has"]), reverse=True)  # assigned in replies that were lost
            held.difference_update(missed)
            self._waiting += missed
            if not self._waiting or ("failed" in self.states and not self._keep_going):
                if not held:
                    self.expected.discard(rank)
                return {"trial": None}
            if message["waits"]:
                return {"trial": 0}
            self._note({"trial": self._waiting[-1], "state": "given", "rank": rank})
            held.add(self._waiting[-1])
            return {"trial": self._waiting.pop()}

    def gone(self, rank: int) -> None:
        with self._lock:
            for trial in sorted(self._held[rank]):
                self._note({"trial": trial, "state": "lost", "rank": rank})


def sweep(plan: dict[str, Any]) -> None:
    """Runs in a worker on each host; `plan` is that of `cli/sweep.py`."""
    info = context.instance_info()
    for name in [name for name in os.environ if _OF_A_RANK.fullmatch(name)]:
        del os.environ[name]
    journal = open(os.path.join(context.run_folder(), f"trials.{info.rank}"), "ab", 0)  # noqa: SIM115

    def note(trial: Trial) -> None:
        # On a full disk, the record before this one may be incomplete, without the end of its line.
        journal.write(b"\n%s\n" % json.dumps(trial).encode())

    for trial in plan["trials"]:
        note(trial)

    def note_own(trial: Trial) -> None:
        with contextlib.suppress(OSError):  # a full disk: rank 0 notes the end too
            note(trial)

    driver = Driver(plan, note_own)
    signal.signal(signal.SIGTERM, lambda *_: driver.stop())
    if info.rank:
        driver.run()
        return
    waiting = [trial["trial"] for trial in plan["trials"] if trial["state"] == "waiting"]
    trials = TrialList(waiting, plan["slots"], note, keep_going=plan["keep_going"])
    head = Head(
        socket.socket(fileno=context.take_listener()), bytes.fromhex(plan["secret"]), trials.handle, trials.gone
    )
    driver.run()
    heard = time.monotonic()
    while trials.expected and time.monotonic() < heard + _RETURN and not driver.stopped.is_set():
        time.sleep(0.1)  # stopped.wait would hold a lock that the handler of SIGTERM needs
        heard = time.monotonic() if head.ranks else heard
    head.close()
    if missing := len(waiting) - trials.states.count("done"):
        count = len(plan["trials"])
        raise SkyfabError(f"only {count - missing} of {count} trials are done")


class SlotGpus:
    """GPUs for one trial at a time, or one GPU for several that share it. Other users come before the next trial."""

    _lock = threading.Lock()  # shared: no claim reads files while another one of this process creates its own

    def __init__(self, numbers: str, run: str) -> None:
        self.numbers = numbers
        gpus = [int(number) for number in numbers.split(",")]
        self._claim = Claim(len(gpus), gpus, run)
        self._trials = 0

    def try_take(self) -> str:
        """Takes the GPUs for one more trial; else returns why not."""
        with self._lock, contextlib.suppress(OSError):  # a full disk: it waits
            if any(one.kind == "ticket" and not one.low and one.overlaps(self._claim.gpus) for one in look()):
                if self._trials:
                    return "others wait for this GPU"
                self._claim.release()
            if self._claim.try_take():
                self._trials += 1
                return ""
        return self._claim.reason or "other programs are about to take GPUs"

    @property
    def fds(self) -> tuple[int, ...]:
        return self._claim.fds

    def give_back(self, trials: int, *, is_over: bool) -> None:
        """Gives them back after some trials, or none. If all are over, releases them and leaves the queue."""
        with self._lock:
            self._trials -= trials
            if is_over and not self._trials:
                self._claim.release()


class Driver:
    """Runs trials on this host, one at a time in each slot."""

    def __init__(self, plan: dict[str, Any], note: Callable[[Trial], None]) -> None:
        self._plan = plan
        self._note = note
        self._info = context.instance_info()
        self._running: dict[int, Trial] = {}
        self._groups: set[int] = set()  # one for each trial, so that its signals do not reach others
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self.stopped = threading.Event()

    def run(self) -> None:
        """Returns when there are no trials left. Raises ChannelLost if rank 0 was never reached."""
        prctl(SUBREAPER, 1)  # what trials leave running becomes our child
        slots = self._plan["slots"][self._info.rank]
        gpus = {numbers: SlotGpus(numbers, self._plan["name"]) for numbers in slots if numbers is not None}
        self._channel = self._connect() if slots else None
        threads = [threading.Thread(target=self._serve, args=(gpus.get(slot),), daemon=True) for slot in slots]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(_LOOK)
            for trial in list(self._running.values()):
                if (values := reported(f"{trial['folder']}/{_REPORT}")) and values != trial.get("values"):
                    trial["values"] = values
                    self._note(trial)
        if self._channel is not None:
            self._channel.close()

    def _connect(self) -> Channel:
        info, secret = self._info, bytes.fromhex(self._plan["secret"])
        return Channel.connect(info.head_addr, info.head_port, secret, info.rank, timeout=_RETURN)

    def stop(self) -> None:
        """Passes SIGTERM on to the trials, which may save what they have."""
        self.stopped.set()
        self._terminate(*self._groups)

    def _terminate(self, *groups: int) -> None:
        for group in groups:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGTERM)

    def _next(self, ended: Trial | None, waits: str) -> Trial | None:
        """Reports the end of a trial, and requests the next: None without more or rank 0, empty if the slot `waits`."""
        with self._lock:
            if ended is not None:
                del self._running[ended["trial"]]
                ended = {**ended, "words": ()}  # rank 0 has them, and they may be longer than a message
            if waits and not self._running:
                phase.enter("waiting", waits)
            while self._channel is not None and not self.stopped.is_set():
                try:
                    number = self._channel.request({"ended": ended, "has": [*self._running], "waits": waits})["trial"]
                except OSError:
                    self._channel = None
                    with contextlib.suppress(OSError):
                        self._channel = self._connect()
                    continue
                if waits and number is not None:
                    return {}
                phase.leave()
                if number is None:
                    break
                about = {"state": "running", "rank": self._info.rank, "host": self._plan["hosts"][self._info.rank]}
                self._running[number] = {**self._plan["trials"][number - 1], **about}
                return self._running[number]
            return None

    def _serve(self, gpus: SlotGpus | None) -> None:
        trial: Trial | None = {}
        ended, waits = None, ""
        while trial is not None:
            until = time.monotonic() + _LOOK
            while gpus and (waits := gpus.try_take()) and time.monotonic() < until and not self.stopped.wait(0.5):
                pass
            trial = self._next(ended, waits)
            ended = self._run(trial, gpus) if trial else None
            if gpus:
                gpus.give_back(0 if waits else 1, is_over=trial is None)

    def _run(self, trial: Trial, gpus: SlotGpus | None) -> Trial | None:
        """Runs a trial in its folder. Returns it with its result; None if the whole run was stopped."""
        self._note(trial)
        folder, began, error = os.path.abspath(trial["folder"]), time.monotonic(), ""
        name = self._plan["script"]
        script = next(path for root in sys.path if os.path.isfile(path := os.path.join(root, name)))
        env = {"SKYFAB_WORKDIR": os.getcwd(), REPORT: f"{folder}/{_REPORT}"}
        if gpus is not None:
            env |= {"CUDA_VISIBLE_DEVICES": gpus.numbers}
        limited = [] if self._plan["share"] is None else ["-c", _LIMITED, self._plan["share"]]
        try:
            os.makedirs(folder, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(env[REPORT])  # of an earlier attempt
            with open(f"{folder}/log.txt", "ab") as log:
                words = [sys.executable, *limited, script, *trial["words"]]
                options: Any = {"stdout": log, "stderr": log, "pass_fds": gpus.fds if gpus else ()}
                options |= {"env": env, "cwd": folder, "start_new_session": True}
                program = start(words, placeholders=False, **options)
            self._groups.add(program.pid)
            if self.stopped.is_set():  # perhaps before `stop` could see it
                self._terminate(program.pid)
            if sys.platform == "linux":  # until it is reaped, its number is not reused
                os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
                mark = f"{REPORT}={env[REPORT]}"
                end_strays(lambda pid: has_variable(pid, mark), group=program.pid)  # they could use its GPUs
                self._groups.discard(program.pid)
            code = program.wait()
            self._groups.discard(program.pid)
            if code:
                full = os.statvfs(folder).f_bavail == 0
                last = end_of_log(f"{folder}/log.txt")[:200]  # where most programs report why they failed
                error = "no space left on its disk" if full else last or how_it_ended(code)
        except (OSError, SkyfabError) as failure:  # no space, or no permission
            code, error = 1, str(failure)
        if self.stopped.wait(1.0) if code == -signal.SIGTERM else self.stopped.is_set():
            return None  # it has not failed, and may not be done even if its exit code is 0
        ended = {**trial, "state": "failed" if code else "done", "code": code, "error": error}
        ended |= {"values": reported(env[REPORT]), "seconds": round(time.monotonic() - began, 3)}
        ended["gpus"] = gpus.numbers if gpus else None
        with contextlib.suppress(OSError), open(f"{folder}/trial.json", "w") as file:
            json.dump(ended, file, indent=2)
        self._note(ended)
        values = [f"{name}={value}" for name, value in ended["values"].items()]
        line = ", ".join(filter(None, [ended["state"], *values, error]))
        print(f"{os.path.basename(trial['folder'])}: {line}".encode(errors="replace").decode())
        return ended
