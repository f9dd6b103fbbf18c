"""Records of detached runs, read on this machine: logs that grow and change files, and rubbish."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyfab as sky
from skyfab.detached.folder import Part, question
from skyfab.detached.logs import LogReader
from skyfab.host.agent import run_folder
from skyfab.host.agent.run_folder import RunFolder
from skyfab.protocol.messages import Result
from skyfab.session.ask import Asker
from skyfab.session.question import Reply
from skyfab.ssh import transport_for

RUN = "abc123"
ABOUT = {
    "id": RUN,
    "name": "night",
    "function": "train",
    "host": "here",
    "hosts": ["here", "there"],
    "place": 0,
    "ranks": [0, 1],
    "world": 4,
    "on": "all",
    "elastic": False,
}
STATUS = {"state": "done", "started": 1.5e9, "ranks": {"0": "done"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "runs" / RUN
    (place / "logs").mkdir(parents=True)
    tmp_path.chmod(0o700)
    return place


@pytest.fixture
def asker(tmp_path: Path, folder: Path) -> Iterator[Asker]:
    host = sky.Host(name="here", transport="local", cache=str(tmp_path))
    with Asker([host], sky.Inventory(hosts={})) as asker:
        yield asker


def parts_of(asker: Asker, run: str = "") -> list[Part]:
    return asker.ask_one(question(run), asker.hosts[0])


def parsed(*values: Any) -> list[Part]:
    """The parts in what a host says."""
    return question().parse(sky.Host(name="liar"), iter([Reply(value, b"") for value in values]))


class Follower:
    """A reader that looks now and then."""

    def __init__(self, asker: Asker, folder: Path) -> None:
        self._asker = asker
        self._folder = folder
        self.reader = LogReader(asker, RUN)

    def write(self, text: str, name: str = "0.out", *, at: float | None = None) -> None:
        """Writes to a log; with `at`, and with the record that the agent makes."""
        with (self._folder / "logs" / name).open("a") as file:
            if at is not None:
                (self._folder / "times").mkdir(exist_ok=True)
                with (self._folder / "times" / name).open("a") as times:
                    times.write(f"{file.tell():015d} {int(at * 1000):015d}\n")
            file.write(text)

    def rotate(self) -> None:
        for kind in ("logs", "times"):
            if (log := self._folder / kind / "0.out").exists():
                log.rename(self._folder / kind / "0.out.1")
        (self._folder / "logs" / "0.out").touch()

    def read_parts(self, *, rest: bool = False) -> list[str]:
        return [line.text for line in self.reader.new(rest=rest)]

    def read_at_once(self, **options: Any) -> list[tuple[str, float]]:
        """What a new reader finds."""
        return [(line.text, line.time) for line in LogReader(self._asker, RUN, **options).new(rest=True)]


@pytest.fixture
def follower(asker: Asker, folder: Path) -> Follower:
    return Follower(asker, folder)


def test_a_log_grows(follower: Follower) -> None:
    assert follower.read_parts() == []
    follower.write("one\ntw")
    assert follower.read_parts() == ["one"]
    follower.write("o\n")
    assert follower.read_parts() == ["two"]
    follower.write("half")
    assert follower.read_parts() == []
    assert follower.read_parts(rest=True) == ["half"]


def test_another_file_that_is_longer_already(follower: Follower) -> None:
    follower.write("one\n")
    assert follower.read_parts() == ["one"]
    follower.write("two, and its ")
    follower.rotate()
    follower.write("end\nthree\nfour\nfive\n")
    assert follower.read_parts() == ["two, and its end", "three", "four", "five"]
    assert follower.read_parts() == []


def test_a_late_reader_gets_what_is_kept(follower: Follower) -> None:
    for number in range(4):
        follower.write(f"line {number}\n")
        follower.rotate()
    follower.write("the last one\n")
    assert follower.read_parts() == ["line 3", "the last one"]
    assert follower.read_parts() == []


def test_a_reader_that_stops_continues_where_it_stopped(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of answers, in either file; lines that are too long for one answer are split."""
    lines = [f"{number} {'x' * 70_000}" for number in range(20)] + ["y" * 300_000]
    follower.write("\n".join(lines[:12]) + "\n12 ")
    follower.rotate()
    follower.write("\n".join([lines[12].removeprefix("12 "), *lines[13:]]) + "\n")
    real, left, found = Asker.ask_one, [0], []

    def ask_one(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionResetError
        return real(*arguments)

    monkeypatch.setattr(Asker, "ask_one", ask_one)
    for _ in range(10):
        left[0] = 1
        new = follower.reader.new(rest=False)
        try:
            while line := next(new, None):
                found.append(line.text)  # what came before it broke counts
        except ConnectionResetError:
            continue
    assert found[:20] == lines[:20]
    assert "".join(found[20:]) == lines[20] and len(found) > 21


def test_logs_are_merged_by_time(follower: Follower) -> None:
    follower.write("a\nb\n", "0.out", at=10)
    follower.write("c\n", "1.out", at=11)
    follower.write("oops\n", "0.err", at=12)
    follower.write("d\n", "0.out", at=13)
    follower.write("e\n", "1.out", at=14)
    everything = [("a", 10.0), ("b", 10.0), ("c", 11.0), ("oops", 12.0), ("d", 13.0), ("e", 14.0)]
    assert follower.read_at_once() == everything
    assert follower.read_parts() == [text for text, _ in everything]
    follower.write("later\n", "0.out", at=15)
    assert follower.read_parts() == ["later"]
    for count in range(1, 8):
        assert follower.read_at_once(tail=count) == [*everything, ("later", 15.0)][-count:]
    for since in (9.0, 10.0, 10.5, 12.0, 15.0, 15.5):
        expected = [line for line in [*everything, ("later", 15.0)] if line[1] >= since]
        assert follower.read_at_once(since=since) == expected
    assert follower.read_at_once(rank=1) == [("c", 11.0), ("e", 14.0)]


def test_the_last_lines_are_found_in_both_files(follower: Follower) -> None:
    """Also with a line that begins in one and ends in the other, and with a last line that has no end yet."""
    for number in range(1000):
        follower.write(f"line {number}\n", at=number)
    follower.write("line ", at=1000)
    follower.rotate()
    follower.write("1000\n", at=1000.5)
    for number in range(1001, 2000):
        follower.write(f"line {number}\n", at=number)
    follower.write("half", at=2000)
    everything = [(f"line {number}", float(number)) for number in range(2000)] + [("half", 2000.0)]
    for count in (1, 2, 9, 40, 1000, 1001, 1003):
        assert follower.read_at_once(tail=count) == everything[-count:]
    assert follower.read_at_once(tail=0) == []
    assert follower.read_at_once(since=1990.0) == everything[1990:]
    assert follower.read_at_once(since=997.5) == everything[998:]
    assert follower.read_at_once(tail=5, since=1999.0) == everything[1999:]


def test_a_host_that_always_has_more_lines_and_sends_none_is_not_asked_for_ever(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = {"lines": [], "cursors": {}, "more": True}
    monkeypatch.setattr(Asker, "ask_one", lambda self, question, host: question.parse(host, iter([Reply(page, b"")])))
    with pytest.raises(sky.ProtocolError, match="more lines, but none"):
        follower.read_parts()


@pytest.mark.parametrize("time", [5e19, -1.0])
def test_a_line_has_a_time_that_can_be_shown(follower: Follower, monkeypatch: pytest.MonkeyPatch, time: float) -> None:
    page = {"lines": [[0, "out", "text", time]], "cursors": {}, "more": False}
    monkeypatch.setattr(Asker, "ask_one", lambda self, question, host: question.parse(host, iter([Reply(page, b"")])))
    with pytest.raises(ValueError, match="lines: out of range"):
        follower.read_parts()


@pytest.mark.parametrize("pid", ["9; reboot", [1], 10**30])
def test_only_a_number_is_the_process_of_a_run_that_does_not_stop(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: Any
) -> None:
    (folder / "about").write_text(json.dumps({**ABOUT, "hosts": ["here"], "name": "x\x1b[2J\x07"}))
    (folder / "status").write_text(json.dumps(STATUS))
    run = sky.attach(RUN, [sky.Host(name="here", transport="local", cache=str(tmp_path))])
    assert repr(run) == "<run abc123 x\\x1b[2J\\x07: done>"
    monkeypatch.setattr("skyfab.detached.run.only", lambda replies: pid)
    with pytest.raises(sky.ProtocolError, match=r"invalid reply to 'runs\.stop'"):
        run.stop()


# ---- what hosts say


def test_a_record_does_not_choose_hosts_to_log_in_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a file on a host: only hosts that were asked, or that the inventory has, are reached."""
    about = {**ABOUT, "hosts": ["here", "local", "root@10.9.8.7:2222", "other"]}
    (folder / "about").write_text(json.dumps(about))
    (folder / "status").write_text(json.dumps(STATUS))
    here, other = (sky.Host(name=name, transport="local", cache=str(tmp_path)) for name in ("here", "other"))
    reached: list[str] = []

    def note(host: sky.Host, inventory: sky.Inventory, **options: Any) -> Any:
        reached.append(host.name)
        return transport_for(host, inventory, **options)

    monkeypatch.setattr("skyfab.session.ask.transport_for", note)
    run = sky.attach(RUN, [here], inventory=sky.Inventory(hosts={"other": other}), results="data")
    assert (run.status, run.unasked) == ("done", ["local", "root@10.9.8.7:2222"])
    for use in (run.result, run.stop, lambda: list(run.logs())):
        with pytest.raises(sky.UsageError, match="local, root@10"):
            use()
    assert set(reached) == {"here", "other"}


def test_runs_are_found_whatever_they_are_called(asker: Asker, folder: Path) -> None:
    (folder / "about").write_text(json.dumps({**ABOUT, "name": "x =run y"}))
    (folder / "status").write_text(json.dumps(STATUS))
    (folder / "logs" / "0.out").write_text("first\n\nlast\n\n")
    (part,) = parts_of(asker, RUN)
    assert (part.about.name, part.state, part.last) == ("x =run y", "done", "last")
    assert [one.about.id for one in parts_of(asker)] == [RUN]
    assert parts_of(asker, "missing") == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"place": -1},
        {"place": 2},
        {"hosts": ["a", "a"]},
        {"ranks": [True]},
        {"name": None},
        {"id": "another"},
        {"ranks": [1, 1]},
        {"ranks": [-1]},
        {"hosts": ["here", "\x1b[2Jthere"]},
    ],
    ids=str,
)
def test_invalid_descriptions_are_passed_over(asker: Asker, folder: Path, wrong: dict[str, Any]) -> None:
    (folder / "about").write_text(json.dumps({**ABOUT, **wrong}))
    (folder / "status").write_text(json.dumps(STATUS))
    assert parts_of(asker, RUN) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, JSON)
def test_whatever_a_host_says_is_read_or_an_invalid_answer(about: Any, failed: Any) -> None:
    parsed({**STATUS, "about": about, "failed": failed}, {**STATUS, "about": ABOUT, "failed": failed})
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        parsed(about, {"gpus": failed})


@pytest.mark.parametrize(
    "status",
    [
        {"state": "done", "started": float("inf")},
        {"state": "done", "started": 10**400},
        {"state": "done", "started": 1e11},
        {"state": "done", "started": -1.0},
        {**STATUS, "failed": {"0": "soon"}},
        {**STATUS, "state": "asleep"},
        {},
    ],
    ids=["never", "huge", "late", "early", "failed", "state", "empty"],
)
def test_impossible_statuses(status: Any) -> None:
    assert parsed({**status, "about": ABOUT}) == []


def test_an_id_is_not_a_path() -> None:
    """It becomes part of file names and of commands."""
    assert len(parsed({**STATUS, "about": ABOUT})) == 1
    for wrong in ("../x", "", "a b", "ü", "a" * 65):
        assert parsed({**STATUS, "about": {**ABOUT, "id": wrong}}) == []


@pytest.mark.parametrize("content", ["", "[" * 100_000, "{", '"done"'], ids=["empty", "deep", "half", "text"])
def test_a_record_that_is_not_json_is_passed_over(asker: Asker, folder: Path, content: str) -> None:
    (folder / "about").write_text(json.dumps(ABOUT))
    (folder / "status").write_text(content)
    assert parts_of(asker) == []


@pytest.mark.parametrize("gone", [False, True], ids=["at-work", "at-its-end"])
def test_a_run_is_running_until_its_agent_has_said_how_it_ended(
    folder: Path, asker: Asker, tmp_path: Path, gone: bool
) -> None:
    """An agent's own folder goes a moment before that: the run is not lost then."""
    own = tmp_path / "own folder"
    own.mkdir()
    with subprocess.Popen(["sleep", "100"], cwd=own) as agent:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            (folder / "agent").write_text(f"{agent.pid} {boot} {own}\n")
            (folder / "about").write_text(json.dumps(ABOUT))
            (folder / "status").write_text(json.dumps({**STATUS, "state": "running"}))
            if gone:
                own.rmdir()
            assert [part.state for part in parts_of(asker)] == ["running"]
        finally:
            agent.kill()
    assert [part.state for part in parts_of(asker)] == ["lost"]


class Full(io.FileIO):
    """A file on a disk that is full at the first call of one method."""

    fails = ""

    def write(self, data: Any) -> int:
        self._check("write")
        return super().write(data)

    def flush(self) -> None:
        self._check("flush")

    def _check(self, method: str) -> None:
        if method == self.fails:
            self.fails = ""
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("method", ["write", "flush"])
def test_a_result_of_which_a_part_is_missing_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Such as its beginning, if the disk is full only then."""
    record, opened = RunFolder(str(tmp_path / "run"), {}, None), list[Full]()
    record.expect(1, 0)
    monkeypatch.setattr(Full, "fails", method)
    monkeypatch.setattr(run_folder, "open", lambda *how: opened.append(Full(*how)) or opened[-1], raising=False)
    record.send(1, Result(parts=[5]).encode(), [b"12345"])
    assert opened[0].closed
    assert record.failed and not (tmp_path / "run" / "result.0").exists()
