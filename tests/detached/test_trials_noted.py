"""What a program makes of the notes of a sweep's hosts, which may be late, partial or anything at all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from skyfab.cli.sweep import _planned
from skyfab.detached.folder import About, Part, State
from skyfab.detached.sweep import Sweep, Trial
from skyfab.inventory.host import Host
from skyfab.session.ask import Outcome
from skyfab.session.question import Question

FOLDER = "sweeps/night-1118-230501/0001-lr=1"


class Hosts:
    """Two hosts of a run, and what is in their files; stands in for the run and for its asker."""

    def __init__(self, states: Sequence[State | None] = ("running", "running"), function: str = "sweep x.py") -> None:
        self.id, self.function, self.files = "0123456789abcdef", function, {"a": b"", "b": b""}
        self.hosts = [Host(name=name, transport="local") for name in self.files]
        self.parts = [
            Part(host=name, about=self._about(place), state=state, started=1.0)
            for place, (name, state) in enumerate(zip(self.files, states, strict=True))
            if state is not None
        ]
        self.asker = self

    def _about(self, place: int) -> About:
        return About(
            id=self.id,
            name="night",
            function=self.function,
            hosts=("a", "b"),
            place=place,
            ranks=(place,),
            world=2,
            on="all",
            elastic=False,
        )

    def look(self) -> None:
        """Nothing changes."""

    def each(self, work: Callable[[Host], Any], hosts: Sequence[Host]) -> list[Outcome[Any]]:
        return [Outcome(host, work(host)) for host in hosts]

    def ask_one(self, question: Question[Any], host: Host) -> bytes:
        assert question.arguments["name"] == f"trials.{'ab'.index(host.name)}"
        return self.files[host.name][question.arguments["start"] :]

    def note(self, host: str, /, **fields: Any) -> None:
        self.files[host] += json.dumps({"trial": 1, **fields}).encode() + b"\n"

    def sweep(self) -> Sweep:
        return Sweep(self)  # type: ignore[arg-type]


def planned(hosts: Hosts) -> None:
    for host in hosts.files:
        hosts.note(host, state="waiting", words=["lr=1"], folder=FOLDER)


def only(hosts: Hosts) -> Trial:
    (found,) = hosts.sweep().look()
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_last_step_counts_in_whatever_order_notes_arrive(order: Sequence[int]) -> None:
    hosts = Hosts()
    planned(hosts)
    notes: list[dict[str, Any]] = [
        {"state": "given", "rank": 1},
        {"state": "running", "rank": 1, "host": "b", "folder": FOLDER, "words": ["lr=1"]},
        {"state": "running", "rank": 1, "host": "b", "folder": FOLDER, "words": ["lr=1"]},
        {"state": "done", "rank": 1, "host": "b", "folder": FOLDER, "words": ["lr=1"], "values": {"loss": 0.5}},
    ]
    for number in order:
        hosts.note("ab"[number % 2], **notes[number])
    found = only(hosts)
    assert (found.state, found.host, found.values, found.words) == ("done", "b", {"loss": 0.5}, ("lr=1",))


def test_a_line_that_is_not_complete_is_read_later() -> None:
    hosts = Hosts()
    planned(hosts)
    sweep, whole = hosts.sweep(), hosts.files["a"]
    for end in range(len(whole)):
        hosts.files = {"a": whole[:end], "b": b""}
        assert sweep.look() == []
    hosts.files = {"a": whole, "b": b""}
    assert len(sweep.look()) == 1
    hosts.note("a", state="given", rank=1)
    assert [trial.state for trial in sweep.look()] == ["running"]


@pytest.mark.parametrize(
    ("notes", "states", "state"),
    [
        ([], ("running", "running"), "waiting"),
        ([], (None, "running"), "unknown"),
        ([], (None, "done"), "unknown"),
        ([], ("failed", "running"), "not started"),
        ([], ("done", "done"), "not started"),
        (["given"], ("running", "running"), "running"),
        (["running"], ("running", "failed"), "lost"),
        (["running"], ("running", "lost"), "lost"),
        (["running"], ("stopped", "stopped"), "stopped"),
        (["running"], ("running", None), "running"),
        (["running", "lost"], ("running", None), "lost"),
        (["running", "lost"], ("running", "running"), "running"),
        (["running"], ("done", None), "lost"),
        (["running", "lost", "failed"], ("done", None), "failed"),
        (["running", "done"], ("lost", "lost"), "done"),
    ],
)
def test_the_state_is_what_the_notes_and_the_hosts_say(
    notes: Sequence[str], states: Sequence[State | None], state: str
) -> None:
    hosts = Hosts(states)
    planned(hosts)
    for note in notes:
        hosts.note("a" if states[0] else "b", state=note, rank=1)
    assert only(hosts).state == state


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[]",
        b"\xff\xfe",
        b'{"trial": "1", "state": "done"}',
        b'{"trial": 1, "state": "perfect"}',
        b'{"trial": 1, "state": "done", "values": {"loss": [1]}}',
        b'{"trial": 1, "state": "done", "values": {"loss": {}}}',
        b'{"trial": 1, "state": "done", "folder": "/etc/cron.d"}',
        b'{"trial": 1, "state": "done", "folder": "sweeps/a-1118-230501/../../x"}',
        b'{"trial": 1, "state": "done", "folder": "sweeps/a-1118-230501/0001-x/y"}',
        b'{"trial": 1, "state": "done", "rank": 1e999}',
        b'{"trial": 1, "state": "done", "seconds": 1e15}',
        b'{"trial": 1, "state": "done", "seconds": -1}',
        b"[" * 100_000,
    ],
)
def test_what_is_not_a_note_is_ignored(line: bytes) -> None:
    hosts = Hosts()
    planned(hosts)
    hosts.files["b"] += line + b"\n"
    assert only(hosts).state == "waiting"


@pytest.mark.parametrize("folder", ["", "sweeps/x-1119-000000/" + "1" * 5000])
def test_a_trial_is_resumed_whatever_a_host_says_of_its_folder(folder: str) -> None:
    before = {("lr=1",): Trial(trial=1, state="failed", words=("lr=1",), folder=folder)}
    known, new = _planned([("lr=1",), ("lr=2",)], before, "x")
    assert known["folder"].startswith("sweeps/x-")
    assert new["folder"].endswith("-lr=2")
