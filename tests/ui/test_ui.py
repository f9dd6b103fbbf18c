"""What a person sees: plain lines are exact and calm, a terminal is live, and no host can steer it.

Views are driven directly, with a clock of the test's own. What a terminal shows is read from a small one below.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage.spot import until
from stage.threads import at_once, begin

import skyfab.ui.screen
from skyfab.errors import printable
from skyfab.ui import display, printer
from skyfab.ui.display import attach
from skyfab.ui.events import (
    CallEnded,
    CallStarted,
    Events,
    HostState,
    Importing,
    Mapped,
    Moved,
    Output,
    State,
    Step,
    Waiting,
)
from skyfab.ui.printer import Plain
from skyfab.ui.prompt import TERMINAL
from skyfab.ui.screen import Screen
from skyfab.ui.suppressed import is_noise
from skyfab.ui.table import table
from skyfab.ui.terminal import LiveLines, clean, clean_lines

SGR = re.compile(r"\x1b\[[0-9;:]*m")


class Clock:
    """Time that passes when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Tty:
    """The screen of a terminal that knows what our live lines need of one."""

    def __init__(self, columns: int = 80) -> None:
        self._rows = [""]
        self._y = self._x = 0
        self._columns = columns
        self._wraps = True

    @property
    def lines(self) -> list[str]:
        return [row.rstrip() for row in self._rows if row.strip()]

    def write(self, text: str) -> None:
        for escape, arg, final, char in re.findall(r"(\x1b\[(\??[0-9;]*)([A-Za-z]))|(.)", text, re.DOTALL):
            if not escape:
                self._char(char)
            elif final == "A":
                self._y -= int(arg or 1)
            elif final == "J":
                self._rows[self._y :] = [self._rows[self._y][: self._x]]
            elif arg == "?7":
                self._wraps = final == "h"
            else:
                assert final == "m", escape

    def _char(self, char: str) -> None:
        if char == "\n":
            self._y, self._x = self._y + 1, 0
            if self._y == len(self._rows):
                self._rows.append("")
        elif char == "\r":
            self._x = 0
        elif self._x < self._columns or self._wraps:
            if self._x == self._columns:  # only the next character begins the next row
                self._char("\n")
            row = self._rows[self._y].ljust(self._x)
            self._rows[self._y] = row[: self._x] + char + row[self._x + 1 :]
            self._x += 1


class Recorder(io.StringIO):
    """A file that counts its writes."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def out(text: str, host: str = "node1", rank: int | None = 0, *, err: bool = False, end: str = "\n") -> Output:
    return Output(host=host, rank=rank, stream="stderr" if err else "stdout", text=text, end=end)


def ended(host: str = "node1") -> CallEnded:
    return CallEnded(host=host, call=1, function="f", seconds=0.1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stdout() -> Recorder:
    return Recorder()


@pytest.fixture
def stderr() -> Recorder:
    return Recorder()


WriteTo = Callable[[TextIO, TextIO], None]


@pytest.fixture
def write_to(monkeypatch: pytest.MonkeyPatch) -> WriteTo:
    """Makes these files standard output and standard error of views; pytest sets those of `sys` before each phase."""

    def set_files(stdout: TextIO, stderr: TextIO) -> None:
        for module in (display, printer, skyfab.ui.screen):
            monkeypatch.setattr(module, "sys", SimpleNamespace(stdout=stdout, stderr=stderr))

    return set_files


@pytest.fixture
def plain(
    stdout: Recorder, stderr: Recorder, clock: Clock, write_to: WriteTo, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Plain]:
    """A view whose thread never runs: only the test flushes."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(Plain, "_soon", lambda self: None)
    monkeypatch.setattr(Plain, "_finish", lambda self: self.flush())
    write_to(stdout, stderr)
    made = Plain(clock)
    yield made
    made.close()


@pytest.fixture
def screen(
    stdout: Recorder, clock: Clock, waiting: Waiting, write_to: WriteTo, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Screen]:
    monkeypatch.setattr(Screen, "_soon", lambda self: None)
    monkeypatch.setattr(Screen, "_finish", lambda self: self.flush())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    write_to(stdout, sys.stderr)
    made = Screen(clock, waiting=waiting)
    yield made
    made.close()


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def seen(file: io.StringIO) -> list[str]:
    tty = Tty()
    tty.write(file.getvalue())
    return tty.lines


# ---- plain lines


def test_both_streams_in_one_file_keep_their_order(clock: Clock, write_to: WriteTo) -> None:
    both = io.StringIO()
    write_to(both, both)
    made = Plain(clock)
    for number in range(6):
        made(out(str(number), err=number % 2 == 1))
    made.close()
    assert both.getvalue() == "".join(f"node1[0] {number}\n" for number in range(6))


class Paused(io.StringIO):
    """A pipe that is not read, until it is."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        self.released.wait(60)
        return super().write(text)


def test_an_output_that_is_not_read_holds_up_no_thread_and_no_more_than_so_much_memory(
    clock: Clock, write_to: WriteTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that emits may be the one that reads a host's stream: without it the host's lease would end."""
    monkeypatch.setattr(printer, "_MOST", 20_000)
    paused = Paused()
    write_to(paused, paused)
    made = Plain(clock, timeout=0.1)

    def emit() -> None:
        for number in range(1000):
            made(out(f"line {number}"))
            made(ended())

    try:
        begin(emit).result(170)
        assert made._waiting <= 20_000
        assert len(made._lines) < 500
    finally:
        paused.released.set()
        made.close()
    lines = paused.getvalue().splitlines()
    (note,) = [line for line in lines if line.startswith("skyfab: ")]
    assert note.endswith("lines dropped: the output was not read")
    assert int(note.split()[1]) + len(lines) - 1 == 1000
    assert lines[0] == "node1[0] line 0"
    assert lines[-1] == "node1[0] line 999"


def test_an_output_that_has_caught_up_is_waited_for_again(clock: Clock, write_to: WriteTo) -> None:
    paused = Paused()
    write_to(paused, paused)
    made = Plain(clock, timeout=0.1)
    made(out("a"))
    made(ended())
    paused.released.set()
    until(lambda: paused.getvalue() == "node1[0] a\n")
    until(lambda: not made._behind)
    made._timeout = 60
    made(out("b"))
    made(ended())
    assert paused.getvalue() == "node1[0] a\nnode1[0] b\n"
    made.close()


def test_plain_shows_what_went_wrong_with_hosts_and_nothing_else(
    plain: Plain, stdout: Recorder, stderr: Recorder
) -> None:
    states: list[State] = ["connecting", "preparing", "closed", "ready"]
    for state in states:
        plain(HostState(host=f"{state} host", state=state))
    plain(HostState(host="node1", state="failed", detail="Unreachable"))
    plain(HostState(host="node2", state="reconnecting"))
    plain(HostState(host="node2", state="ready"))
    plain(HostState(host="node3", state="lost", detail="no \x1b[2Jword"))
    assert stderr.getvalue().splitlines() == [
        "node1: failed (Unreachable)",
        "node2: reconnecting",
        "node2: ready",
        "node3: lost (no word)",
    ]
    assert stdout.getvalue() == ""


# ---- bars: lines that ask to be overwritten


def test_a_log_has_only_the_last_state_of_a_bar(plain: Plain, stderr: Recorder) -> None:
    for percent in range(100):
        plain(out(f"{percent}%", err=True, end="\r"))
    plain(out("100%", err=True))
    plain.flush()
    assert stderr.getvalue() == "node1[0] 100%\n"


@pytest.mark.parametrize("close", [False, True])
def test_a_bar_that_was_not_finished_stays_at_the_end(plain: Plain, stdout: Recorder, close: bool) -> None:
    plain(out("70%", rank=None, end="\r"))
    if close:
        plain.close()
    else:
        plain(ended("node2"))
        assert stdout.getvalue() == ""
        plain(ended("node1"))
    assert stdout.getvalue() == "node1 70%\n"


# ---- the terminal


def test_lines_on_a_terminal_are_aligned_and_coloured_by_host(screen: Screen, stdout: Recorder) -> None:
    for host in ("node1", "gpu-node22"):
        screen(HostState(host=host, state="connecting"))
        screen(HostState(host=host, state="ready"))
    for event in (out("a", "gpu-node22", 1), out("b"), out("c", err=True)):
        screen(event)
    screen.flush()
    assert seen(stdout)[-3:] == ["gpu-node22[1] │ a", "node1[0]      │ b", "node1[0]      │ c"]
    one, two, three = stdout.getvalue().splitlines()[-3:]
    assert "\x1b[32mgpu-node22[1]" in one
    assert two.startswith("\x1b[36mnode1[0]")
    assert "\x1b[2m│" in two and "\x1b[31m│" in three


def test_a_terminal_shows_bars_in_place_below_the_lines(screen: Screen, stdout: Recorder) -> None:
    for percent in (10, 20, 30):
        for rank in (1, 0):
            screen(out(f"{percent}%", rank=rank, err=True, end="\r"))
        screen(out(f"note {percent}"))
        screen.flush()
    assert seen(stdout) == [
        "node1[0] │ note 10",
        "node1[0] │ note 20",
        "node1[0] │ note 30",
        "node1[0] │ 30%",
        "node1[1] │ 30%",
    ]
    screen(out("100%", rank=1, err=True))
    screen.close()
    assert seen(stdout)[-2:] == ["node1[1] │ 100%", "node1[0] │ 30%"]


def test_a_part_of_a_line_that_the_program_has_printed_stays(screen: Screen, stdout: Recorder) -> None:
    stdout.write("fold 1 ... ")
    screen(out("10%", end="\r"))
    screen.flush()
    assert seen(stdout) == ["fold 1 ...", "node1[0] │ 10%"]
    screen(out("done"))
    screen.close()
    stdout.write("fold 2 ... ")
    screen(out("a line"))
    screen.flush()
    assert seen(stdout) == ["fold 1 ...", "node1[0] │ done", "fold 2 ...", "node1[0] │ a line"]


def test_a_long_bar_takes_one_row_and_a_long_line_is_not_cut(screen: Screen, stdout: Recorder) -> None:
    for text in ("x" * 500, "y" * 500):
        screen(out(text, end="\r"))
        screen.flush()
    [row] = seen(stdout)
    assert row.startswith("node1[0] │ yyy") and len(row) <= 80
    screen(out("x" * 5000))
    screen.flush()
    assert "x" * 5000 in stdout.getvalue()


def test_more_bars_than_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "6")
    monkeypatch.setenv("COLUMNS", "80")
    tty = Tty()
    live = LiveLines()
    for state in ("a", "b"):
        tty.write(live.frame("", [f"{state}{number}" for number in range(64)]))
    assert tty.lines == ["b0", "b1", "b2", "b3", "… and 60 more"]


def test_hosts_on_their_way_become_one_line(screen: Screen, stdout: Recorder, clock: Clock) -> None:
    names = [f"node{number}" for number in range(1, 5)]
    for name in names:
        screen(HostState(host=name, state="connecting"))
    assert [line[2:] for line in seen(stdout)] == [f"{name} connecting" for name in names]
    screen(HostState(host="node2", state="preparing", detail="sends 3 MB"))
    screen(HostState(host="node1", state="ready", detail="Python 3.11"))
    assert [line[2:] for line in seen(stdout)] == ["node2 sends 3 MB", "node3 connecting", "node4 connecting"]
    clock.now += 0.9
    for name in names[1:]:
        screen(HostState(host=name, state="ready"))
    assert seen(stdout) == ["✓ 4 hosts ready in 0.9 s"]


def test_the_progress_of_a_transfer_is_erased_before_the_program_continues(screen: Screen, stdout: Recorder) -> None:
    screen(HostState(host="node1", state="ready"))
    screen(Step(host="node1", text="comparing files"))
    screen.flush()
    screen(Step(host="node1", text=""))
    stdout.write("compared\n")
    screen(Moved(host="node1", what="sending files", done=1, total=3))
    screen.flush()
    assert [line[2:] for line in seen(stdout)] == ["mpared", "node1 sending files 1 of 3 bytes"]
    screen(Moved(host="node1", what="sending files", done=3, total=3))
    stdout.write("sent\n")
    assert seen(stdout) == ["compared", "sent"]


def test_the_screen_is_left_alone_while_a_password_is_asked_for(
    screen: Screen, stdout: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen(HostState(host="node1", state="connecting"))
    before = stdout.writes
    monkeypatch.setattr(TERMINAL, "_since", 0.0)
    screen(HostState(host="node2", state="connecting"))
    screen.flush()
    assert stdout.writes == before
    monkeypatch.setattr(TERMINAL, "_since", None)
    screen.flush()
    assert len(seen(stdout)) == 2


# ---- what hosts may not do to a terminal


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("plain ünïcödé 漢字 🙂", "plain ünïcödé 漢字 🙂"),
        ("tab\tstays", "tab\tstays"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]52;c;Y2xpcGJvYXJk\x1b\\text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never ends", ""),
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("\x1b[?1049hscreen", "screen"),
        ("\x1bPq#0;2;0;0;0\x1b\\sixel", "sixel"),
        ("\x1b_apc\x1b\\\x1b^pm\x1b\\\x1bXsos\x1b\\x", "x"),
        ("\x9b2J\x9d0;c1\x9cx", "x"),
        ("\x1bcreset \x1b(0lines", "reset lines"),
        ("bell\x07 back\x08 nul\0 del\x7f", "bell back nul del"),
        ("half \x1b[", "half "),
        ("half \x1b", "half "),
        ("\x1b\x1b[2Jx", "x"),
        ("two\r\nlines", "twolines"),
        ("\x1b[6n\x1b[cx", "x"),
        ("a\u202egpj.exe\u202c \u2066b\u2069 \u200fc\u061c", "agpj.exe b c"),
    ],
)
def test_no_host_can_steer_the_terminal(hostile: str, harmless: str) -> None:
    assert clean(hostile) == harmless
    assert clean(hostile, colour=False) == harmless
    shown = printable(hostile)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]", shown)


def test_colours_stay_and_end_with_their_line() -> None:
    assert clean("\x1b[1;31mred") == "\x1b[1;31mred\x1b[0m"
    assert clean("\x1b[38;2;1;2;3mrgb\x1b[m\x1b[2K") == "\x1b[38;2;1;2;3mrgb\x1b[m\x1b[0m"
    assert clean("\x1b[1;31mred", colour=False) == "red"
    assert clean_lines("a\x1b[2J\n\x1b[31mb") == "a\nb"


@given(st.text(alphabet=st.sampled_from("ab;m[]?0123\\PX^_\x07\x1b\x9b\x9c\x9d\r\n\t\x00é"), max_size=40))
def test_whatever_a_host_writes_only_colours_come_through(text: str) -> None:
    left = SGR.sub("", clean(text))
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", left)
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", clean(text, colour=False))


# ---- attached


def test_lines_appear_without_anybody_asking_and_the_thread_ends(stdout: Recorder, write_to: WriteTo) -> None:
    events = Events()
    write_to(stdout, stdout)
    detach = attach(events, "plain")
    events.emit(out("one"))
    until(lambda: stdout.getvalue() == "node1[0] one\n")
    events.emit(out("two"))
    until(lambda: stdout.getvalue().endswith("two\n"))
    detach()
    assert not [thread for thread in threading.enumerate() if thread.name == "skyfab-ui"]
    events.emit(out("unheard"))
    assert "unheard" not in stdout.getvalue()


def test_nothing_is_lost_or_torn_when_many_hosts_speak(stdout: Recorder, write_to: WriteTo) -> None:
    events = Events()
    write_to(stdout, stdout)
    detach = attach(events, "plain")

    def speak(host: str) -> None:
        for number in range(2000):
            events.emit(out(f"{number}", host, None))

    at_once(speak, [f"node{number}" for number in range(4)])
    detach()
    lines = stdout.getvalue().splitlines()
    for number in range(4):
        mine = [line for line in lines if line.startswith(f"node{number} ")]
        assert mine == [f"node{number} {count}" for count in range(2000)]


def test_a_reader_that_left_does_not_disturb_the_call(capsys: pytest.CaptureFixture[str], write_to: WriteTo) -> None:
    source, sink = os.pipe()
    os.close(source)
    events = Events()
    with open(sink, "w", closefd=False) as file:
        write_to(file, file)
        detach = attach(events, "plain")
        for _ in range(3):
            events.emit(out("x" * 100_000))
            events.emit(ended())
        detach()
        with Path(os.devnull).open("w") as nowhere:  # what is left in its buffer has somewhere to go
            os.dup2(nowhere.fileno(), sink)
    os.close(sink)
    assert tuple(capsys.readouterr()) == ("", "")


def test_characters_that_the_file_cannot_hold_are_spelled_out(write_to: WriteTo) -> None:
    raw = io.BytesIO()
    events = Events()
    write_to(io.TextIOWrapper(raw, encoding="ascii", write_through=True), sys.stderr)
    detach = attach(events, "plain")
    events.emit(out("naïve 🙂"))
    events.emit(ended())
    assert raw.getvalue() == b"node1[0] na\\xefve \\U0001f642\n"
    detach()


# ---- tables


def test_a_plain_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    table(("host", "loss"), [("node1", "0.5"), ("n2", "10.25"), ("\x1b[2Jn3", "")], right=("loss",))
    assert capsys.readouterr().out.splitlines() == ["host    loss", "node1    0.5", "n2     10.25", "n3"]


# ---- what runs


def over(function: str, host: str = "node1", call: int = 1, error: str | None = None) -> CallEnded:
    return CallEnded(host=host, call=call, function=function, seconds=1.0, error=error)


def test_a_call_that_takes_long_has_a_line_while_the_program_waits_for_it(
    screen: Screen, stdout: Recorder, clock: Clock, waiting: Waiting
) -> None:
    with waiting:
        for host in ("node1", "node2"):
            screen(CallStarted(host=host, call=1, function="train", ranks=4))
        screen.flush()
        assert seen(stdout) == [], "most calls are short"
        clock.now += 72
        screen.flush()
        (line,) = seen(stdout)
        assert line[2:] == "train · 8 ranks · 1:12"
        screen(out("epoch 1"))
        screen.flush()
        assert [line[-22:] for line in seen(stdout)] == ["node1[0] │ epoch 1", "train · 8 ranks · 1:12"]
    assert seen(stdout) == ["node1[0] │ epoch 1"], "what the program prints next stands alone"
    clock.now += 10
    screen.flush()
    assert seen(stdout) == ["node1[0] │ epoch 1"], "it may print"


def test_a_call_that_has_ended_has_no_line(screen: Screen, stdout: Recorder, clock: Clock, waiting: Waiting) -> None:
    with waiting:
        for call in (1, 2):
            screen(CallStarted(host="node1", call=call, function="f"))
        clock.now += 2
        screen(over("f"))
        screen.flush()
        assert [line[2:] for line in seen(stdout)] == ["f · 1 rank · 0:02"]
        screen(over("f", call=2))
        screen(over("unknown", call=3))
        screen.flush()
        assert seen(stdout) == []


def imports(module: str, *, host: str = "node1", rank: int | None = 0) -> Importing:
    return Importing(host=host, rank=rank, worker=f"gang1.{rank}", module=module)


def test_a_long_import_is_told_in_the_line_of_its_call(
    screen: Screen, stdout: Recorder, clock: Clock, waiting: Waiting
) -> None:
    with waiting:
        for host in ("node1", "node2"):
            screen(CallStarted(host=host, call=1, function="train"))
        clock.now += 10
        screen(imports("torch"))
        screen(imports("torch", host="node2", rank=1))
        screen(imports("jax", host="node3", rank=2))  # of another call
        screen.flush()
        assert [line[2:] for line in seen(stdout)] == ["train · 2 ranks · 0:10"], "most imports are short"
        clock.now += 1
        screen.flush()
        assert [line[2:] for line in seen(stdout)] == ["train · 2 ranks · 0:11 · importing torch"]
        screen(imports(""))
        screen(imports("", host="node2", rank=1))
        screen.flush()
        assert [line[2:] for line in seen(stdout)] == ["train · 2 ranks · 0:11"]


def test_a_map_says_how_far_it_is_and_how_long_it_takes(
    screen: Screen, stdout: Recorder, clock: Clock, waiting: Waiting
) -> None:
    with waiting:
        screen(Mapped(host="", function="square", done=1, total=1000))
        screen(CallStarted(host="node1", call=1, function="square"))
        clock.now += 10
        screen(Mapped(host="", function="square", done=250, total=1000))
        screen.flush()
        assert [line[2:] for line in seen(stdout)] == ["square · 250 of 1,000 · 25/s · 0:30 left"]
        screen(over("square"))
        screen(Mapped(host="", function="square", done=250, total=1000, failed=True))
        screen.flush()
        assert seen(stdout) == []


def test_a_host_that_does_not_answer_counts_its_seconds_until_it_is_back(
    screen: Screen, stdout: Recorder, clock: Clock
) -> None:
    screen(HostState(host="node2", state="reconnecting", detail="no heartbeat for 3 s", limit=10.0))
    clock.now += 4
    screen.flush()
    assert [line[2:] for line in seen(stdout)] == ["node2 no heartbeat for 3 s · reconnecting for 4 s, lost in 6 s"]
    assert "lost after 10 s" in str(HostState(host="a", state="reconnecting", detail="x", limit=10.0))
    screen(HostState(host="node2", state="ready"))
    assert seen(stdout) == ["✓ node2 ready in 4.0 s"]


NUMPY = "Failed to initialize NumPy: No module named"
NOISE = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (NOISE, True),
        ("[W1116 10:00:00.1 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved.", True),
        ("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR", True),
        ("E0000 00:00:1731750000.123456    4242 cuda_dnn.cc:8310] Unable to register cuDNN factory", True),
        (f"/skyfab cache/torch/x.py:283: UserWarning: {NUMPY} 'numpy' (Triggered internally at /x.cpp:84.)", True),
        ('  cpu = _conversion_method_template(device=torch.device("cpu"))', True),
        (f"/x.py:3: UserWarning: {NUMPY} 'numba'", False),
        *(
            (line, False)
            for line in (
                "",
                "  cpu = 1",
                "/x.py:3: UserWarning: mine",
                "Warning: loss is nan",
                "[W] mine",
                "E1 failed",
                "Rank 0 is connected to 1",
            )
        ),
    ],
)
def test_noise(line: str, expected: bool) -> None:
    assert is_noise(line) is expected
