"""Questions to hosts: one login, no agent, answers in parts, hosts that break off or answer rubbish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage.spot import until

import skyfab as sky
from skyfab.errors import HostLost, HostUnfit, ProtocolError
from skyfab.host.ask.command import _output
from skyfab.inspect.survey import SURVEY
from skyfab.protocol.frames import HEAD, PONG, frame
from skyfab.session import ask, question
from skyfab.session.ask import Asker
from skyfab.session.bootstrap import CACHE_HINT
from skyfab.session.question import Question, Reply, only
from skyfab.ssh.local import Local

NOTHING = sky.Inventory(hosts={})
CLOCK: Question[float] = Question("survey.clock", lambda host, replies: float(only(replies)))


@pytest.fixture
def here(tmp_path: Path) -> sky.Host:
    return sky.Host(name="here", transport="local", cache=str(tmp_path / "cache"))


@pytest.fixture
def logins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that were started on hosts."""
    found: list[str] = []
    real = Local.open

    def note(transport: Local, command: str, *arguments: Any) -> Any:
        found.append(command)
        return real(transport, command, *arguments)

    monkeypatch.setattr(Local, "open", note)
    return found


def command(line: str, parse: Callable[[sky.Host, Iterator[Reply]], Any]) -> Question[Any]:
    return Question("command", parse, {"line": line, "workdir": "", "variables": {}})


def test_one_login_serves_all_questions_and_starts_no_agent(here: sky.Host, logins: list[str]) -> None:
    with Asker([here], NOTHING) as asker:
        assert abs(asker.ask_one(CLOCK, here) - time.time()) < 60
        (outcome,) = asker.ask(SURVEY)
        assert outcome.get().cpus >= 1
    assert len(logins) == 1
    assert not Path(here.cache, "run").exists(), "no agent"


def test_what_a_question_raises_is_an_error_of_the_host_and_the_next_one_is_answered(here: sky.Host) -> None:
    with Asker([here], NOTHING) as asker:
        for question in (
            Question("nothing", only_of),
            Question("survey.clock", only_of, {"wrong": 1}),
            Question("../x", only_of),
        ):
            with pytest.raises(HostUnfit, match="failed: ") as failed:
                asker.ask_one(question, here)
            assert failed.value.hint
        assert asker.ask_one(CLOCK, here)


def only_of(host: sky.Host, replies: Iterator[Reply]) -> Any:
    return only(replies)


def test_a_connection_that_ended_while_nothing_was_asked_is_renewed(here: sky.Host, logins: list[str]) -> None:
    with Asker([here], NOTHING) as asker:
        asker.ask_one(CLOCK, here)
        asker.lines["here"]._frames.stream._process.kill()  # type: ignore[union-attr]
        asker.ask_one(CLOCK, here)
    assert len(logins) == 2


@pytest.mark.parametrize(
    "line",
    [
        "echo $$ $PWD; exec sleep 100",
        "sh -c 'trap \"\" TERM; echo $$ $PWD; exec sleep 100'; true",
    ],
    ids=["obeys", "its child ignores SIGTERM"],
)
def test_an_answer_comes_in_parts_and_ends_with_the_asker(here: sky.Host, line: str) -> None:
    """What a question has started does not outlive the client, nor does its temporary folder."""

    def parse(host: sky.Host, replies: Iterator[Reply]) -> int:
        pid, folder = next(replies).data.decode().split()
        os.kill(int(pid), 0)
        assert Path(folder).is_dir()
        raise KeyboardInterrupt(pid, folder)

    with pytest.raises(KeyboardInterrupt) as stopped, Asker([here], NOTHING) as asker:
        asker.ask_one(command(line, parse), here)
    pid, folder = stopped.value.args
    until(lambda: not Path(f"/proc/{pid}/fd").exists() and not Path(folder).exists())


def test_a_command_gives_its_output_and_its_exit_code(here: sky.Host) -> None:
    def parse(host: sky.Host, replies: Iterator[Reply]) -> Any:
        *pieces, last = replies
        return {name: b"".join(one.data for one in pieces if one.value == name) for name in ("stdout", "stderr")}, last[
            0
        ]

    with Asker([here], NOTHING) as asker:
        assert asker.ask_one(command("echo a; echo b >&2; exit 3", parse), here) == (
            {"stdout": b"a\n", "stderr": b"b\n"},
            3,
        )
        assert asker.ask_one(command("kill -9 $$", parse), here)[1] == -signal.SIGKILL
        began = time.monotonic()
        asker.ask_one(command("sleep 100 & echo $!", parse), here)
        assert time.monotonic() - began < 90, "what runs in the background is not waited for"


def test_output_that_is_written_while_the_end_is_noticed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at its pipes and the look at the process, it writes and ends."""
    monkeypatch.setattr(subprocess.Popen, "poll", subprocess.Popen.wait)
    with subprocess.Popen(["sh", "-c", "sleep 0.2; echo x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert list(_output(process)) == [("stdout", b"x\n")]


def test_a_host_that_cannot_be_reached_is_not_tried_at_every_question() -> None:
    dead = sky.Host(name="dead", address="127.0.0.1", port=1, user="root")
    told: list[sky.SkyfabError] = []
    with Asker([dead], NOTHING, trouble=told.append) as asker:
        found = [asker.ask(CLOCK)[0].error for _ in range(3)]
    assert all(isinstance(error, sky.Unreachable) for error in found)
    assert found[0] is found[1] is found[2] and told == found[:1]


def test_waiting_ends_when_the_asker_is_stopped_or_its_time_is_over(here: sky.Host) -> None:
    def parse(host: sky.Host, replies: Iterator[Reply]) -> None:
        next(replies)
        asker.stop()
        next(replies)

    with Asker([here], NOTHING) as asker, pytest.raises(HostLost, match="closed"):
        asker.ask_one(command("echo; exec sleep 100", parse), here)
    with Asker([here], NOTHING, until=time.monotonic() - 1) as asker, pytest.raises(HostLost):
        asker.ask_one(CLOCK, here)


def test_python_is_installed_only_where_the_inventory_names_none(here: sky.Host) -> None:
    asked: list[str] = []

    def prepare(host: sky.Host, session: str) -> Callable[[Any], None]:
        asked.append(host.python)
        return lambda shell: None

    for python in ("auto", sys.executable):
        host = replace(here, python=python)
        with Asker([host], NOTHING, prepare=prepare) as asker:
            asker.ask_one(CLOCK, host)
    assert asked == ["auto"]


def test_another_command_runs_over_the_connection_of_a_question(
    here: sky.Host, logins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Asker([here], NOTHING) as asker:
        asker.ask_one(CLOCK, here)
        transport = asker.take(here)
        assert transport is not None and asker.take(here) is None
    stream = transport.open("echo hello; exec cat")
    found = bytearray()
    try:
        until(lambda: read(stream, found) == b"hello\n")
        joined: list[Local] = []
        monkeypatch.setattr(Local, "joined", lambda transport: joined.append(transport))
        transport.joined()
        assert len(joined) == 1
    finally:
        stream.close()
        transport.close()
    assert len(logins) == 1


def test_a_host_gets_heartbeats_while_its_answer_is_not_read_and_while_it_has_no_question(
    here: sky.Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take this program for gone: `skyfab exec … | less` may wait for its reader for hours."""
    monkeypatch.setattr(ask, "_HEARTBEAT", 0.01)
    beats: list[float] = []
    real = question.QuestionStream._send_heartbeat

    def note(stream: question.QuestionStream) -> None:
        real(stream)
        beats.append(time.monotonic())

    monkeypatch.setattr(question.QuestionStream, "_send_heartbeat", note)

    def parse(host: sky.Host, replies: Iterator[Reply]) -> int:
        next(replies)
        before = len(beats)
        until(lambda: len(beats) > before + 5, "heartbeats come")
        return 1

    with Asker([here], NOTHING) as asker:
        assert asker.ask_one(replace(CLOCK, parse=parse), here) == 1
        before = len(beats)
        until(lambda: len(beats) > before + 5, "heartbeats come")
        assert asker.ask_one(CLOCK, here), "their replies are skipped"
        transport = asker.take(here)
        assert transport is not None
        before = len(beats)
        time.sleep(0.1)
        assert len(beats) == before, "the stream gets another use"
        transport.close()


def read(stream: Any, found: bytearray) -> bytes:
    room = bytearray(100)
    try:
        found += room[: stream.recv_into(memoryview(room)) or 0]
    except BlockingIOError:
        pass
    return bytes(found)


@pytest.mark.lab
def test_a_pool_with_a_condition_logs_in_once(here: sky.Host, logins: list[str]) -> None:
    with sky.Compute([here], where="cpus >= 1", ui="none") as pool:
        assert sky.function(abs)(-3) >> pool == 3
    assert len(logins) == 1


# ---- hosts that lie


class Liar:
    """A stream on which a host says what it likes."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    def recv_into(self, view: memoryview) -> int:
        piece, self._said = self._said[: len(view)], self._said[len(view) :]
        view[: len(piece)] = piece
        return len(piece)

    def send(self, buffers: Any) -> int:
        return sum(map(len, buffers))

    def explain(self) -> Exception:
        return sky.HostLost("it has ended", host="liar")


def said(content: bytes) -> Any:
    frames = question.QuestionStream(sky.Host(name="liar"), Liar(content), lambda: False)  # type: ignore[arg-type]
    return frames.ask(Question("x", only_of))


@pytest.mark.parametrize(
    "content",
    [
        frame(HEAD, 1, b"[1]"),
        frame(HEAD, 1, b"{"),
        frame(HEAD, 1, b'{"value": 1}') + frame(HEAD, 1, b'{"value": 2}') + frame(HEAD, 1, b'{"end": true}'),
        frame(HEAD, 1, b'{"end": true}'),
        b"x" * 100,
        frame(17, 1, b"data"),
        frame(HEAD, 1, b"[" * 100_000),
    ],
    ids=["list", "half", "two", "none", "rubbish", "data", "deep"],
)
def test_an_invalid_answer_is_a_protocol_error(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        said(content)


@pytest.mark.parametrize(
    ("parse", "content"),
    [
        (lambda host, replies: next(replies), b""),
        (lambda host, replies: float(only(replies)), frame(HEAD, 1, b'{"value": 1%s}' % (b"0" * 400))),
        (lambda host, replies: int(only(replies)), frame(HEAD, 1, b'{"value": Infinity}')),
    ],
    ids=["empty", "huge", "infinite"],
)
def test_an_answer_that_cannot_be_read_is_a_protocol_error(parse: Any, content: bytes) -> None:
    frames = question.QuestionStream(
        sky.Host(name="liar"), Liar(content + frame(HEAD, 1, b'{"end": 1}')), lambda: False
    )  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="invalid reply to 'x'"):
        frames.ask(Question("x", parse))


def test_heartbeats_are_no_part_of_an_answer(here: sky.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a host that sends nothing else would be waited for where others have answered."""
    stream = Silent(60, frame(PONG))
    for module in (ask, question):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: stream.now))
    with Asker([here], NOTHING) as asker:
        line = asker.lines["here"]
        line._frames = frames = question.QuestionStream(here, stream, lambda: False)  # type: ignore[arg-type]
        assert line.is_awaited
        with pytest.raises(HostLost):
            frames.ask(Question("x", only_of))
        assert not line.is_awaited
        line._frames = None


def test_frames_that_are_no_answer_are_passed_over() -> None:
    late = frame(HEAD, 7, b'{"value": 1}') + frame(PONG)
    assert said(late + frame(HEAD, 1, b'{"value": 2}') + frame(HEAD, 1, b'{"end": 1}')) == 2


@pytest.mark.parametrize(
    ("about", "hint"),
    [(b'"errno": 28', CACHE_HINT), (b'"errno": 2', None), (b'"errno": null', "please report this")],
)
def test_the_hint_of_a_failure_depends_on_its_cause(about: bytes, hint: str | None) -> None:
    with pytest.raises(HostUnfit, match="x failed: why") as failed:
        said(frame(HEAD, 1, b'{"error": "why", %s}' % about))
    assert (failed.value.hint or "").startswith(hint or "") and bool(failed.value.hint) is bool(hint)


class Silent(Liar):
    """Says nothing for a number of seconds, one for each read."""

    def __init__(self, seconds: int, said: bytes) -> None:
        super().__init__(said)
        self.now = 0
        self._seconds = seconds

    def recv_into(self, view: memoryview) -> int:
        self.now += 1
        if self.now <= self._seconds:
            raise BlockingIOError
        return super().recv_into(view)

    def fileno(self) -> None: ...
    def stderr(self) -> None: ...
    def drain(self) -> None: ...


@pytest.mark.parametrize(("seconds", "is_lost"), [(60, False), (61, True)])
def test_a_silent_host_is_lost_after_a_minute(monkeypatch: pytest.MonkeyPatch, seconds: int, is_lost: bool) -> None:
    stream = Silent(seconds, frame(HEAD, 1, b'{"value": 2}') + frame(HEAD, 1, b'{"end": 1}'))
    monkeypatch.setattr(question, "time", SimpleNamespace(monotonic=lambda: stream.now))
    frames = question.QuestionStream(sky.Host(name="silent"), stream, lambda: False)  # type: ignore[arg-type]
    if is_lost:
        with pytest.raises(HostLost, match="no response for 60 s"):
            frames.ask(Question("x", only_of))
    else:
        assert frames.ask(Question("x", only_of)) == 2


@given(st.binary(max_size=200))
def test_whatever_a_host_says_is_an_answer_or_an_error(content: bytes) -> None:
    with pytest.raises(sky.SkyfabError):
        said(content)
