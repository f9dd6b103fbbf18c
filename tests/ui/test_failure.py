"""What a failure shows: the program's own frames, the host's, and the cause on the last line, with host and rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyfab.errors import (
    BroadcastError,
    CallCancelled,
    HostLost,
    PoolError,
    RemoteTraceback,
    Unreachable,
    WorkerDied,
    broadcast_error,
)
from skyfab.ui import failure

HEADER = "Traceback (most recent call last):"


def from_host(error: Exception, host: str = "node1", rank: int | None = None, frames: str = "") -> Exception:
    error.__cause__ = RemoteTraceback(f"{HEADER}\n{frames}{type(error).__name__}: {error}\n", host, rank)
    return error


FRAMES = '  File "/home/ada/model.py", line 3, in step\n    raise ValueError(n)\n'


def test_the_cause_is_the_last_line_with_its_host_and_rank() -> None:
    error = from_host(ValueError("bad batch"), "node2", 1, FRAMES)
    assert failure.text(error).splitlines() == [
        "on node2[1]:",
        '  File "/home/ada/model.py", line 3, in step',
        "    raise ValueError(n)",
        "node2[1] ValueError: bad batch",
    ]


def test_ranks_that_were_stopped_did_not_fail() -> None:
    failures = [from_host(ValueError("bad batch"), "node2", 1, FRAMES), CallCancelled("stopped", host="node1", rank=0)]
    error = broadcast_error("train", failures, [*reversed(failures), 7])
    assert error.exceptions == tuple(failures[:1])
    assert error.results == [failures[1], failures[0], 7]
    assert failure.text(error).splitlines()[-2:] == [
        "train failed on 1 of 3 ranks; 1 stopped",
        "node2[1] ValueError: bad batch",
    ]


def test_equal_errors_are_shown_once_and_the_first_failure_last() -> None:
    failures = [from_host(ValueError("boom"), f"node{rank}", rank, FRAMES) for rank in (2, 0, 1)]
    failures.insert(1, from_host(KeyError("x"), "node3", 3))
    lines = failure.text(BroadcastError("f failed on 4 of 4 ranks", failures)).splitlines()
    assert lines[-3:] == [
        "f failed on 4 of 4 ranks",
        "node3[3] KeyError: 'x'",
        "node2[2] ValueError: boom (same error on 2 more ranks)",
    ]
    assert str(BroadcastError("f failed on 4 of 4 ranks", failures)).splitlines()[1] == "  node2[2] ValueError: boom"


START = (
    '  File "/root/.cache/skyfab/bundles/ab12/skyfab/calls/script.py", line 27, in perform\n'
    '    runpy.run_path(path, run_name="__main__")\n'
    '  File "<frozen runpy>", line 291, in run_path\n'
)


def test_frames_that_start_a_script_are_not_shown() -> None:
    text = failure.text(from_host(ValueError("x"), "node1", 0, START + FRAMES))
    assert text == failure.text(from_host(ValueError("x"), "node1", 0, FRAMES))
    assert "model.py" in text


@pytest.mark.parametrize("margin", ["", "  | "])
def test_nor_are_they_in_chains_and_groups(margin: str) -> None:
    first = f"  + Exception Group {HEADER}\n" if margin else f"{HEADER}\n  a\nKeyError: 1\n\nDuring …\n\n{HEADER}\n"
    last = f"{margin}ValueError: second\n{margin}  more"

    def shown(frames: list[str]) -> str:
        error = ValueError("second\n  more")
        error.__cause__ = RemoteTraceback(first + "".join(margin + line for line in frames) + last, "node1")
        return failure.text(error)

    assert shown((START + FRAMES).splitlines(keepends=True)) == shown(FRAMES.splitlines(keepends=True))


def test_a_message_of_several_lines_and_notes_are_shown() -> None:
    error = from_host(ValueError("two\nlines"), frames=FRAMES)
    error.__notes__ = ["hint: do this"]  # type: ignore[attr-defined]
    assert failure.text(error).splitlines()[-3:] == ["node1 ValueError: two", "lines", "hint: do this"]


def test_errors_of_skyfab_have_their_type_place_and_hint() -> None:
    error = HostLost("no heartbeat", host="node2", hint="is it up?")
    assert failure.text(error).splitlines() == ["node2 HostLost: no heartbeat", "hint: is it up?"]
    assert failure.summary(error, "error: ") == "error: node2: no heartbeat\nhint: is it up?"
    several = PoolError("2 hosts failed", [Unreachable("x", host="a"), Unreachable("y", host="b")])
    assert failure.text(several).splitlines() == ["2 hosts failed", "  a: x", "  b: y"]


def test_what_a_host_says_cannot_control_the_terminal() -> None:
    error = from_host(ValueError("\x1b]0;title\x07a"), frames='  File "\x1b[2J"\n')
    assert "\x1b" not in failure.text(error)


def test_an_error_that_came_of_one_is_shown_after_it() -> None:
    try:
        try:
            raise WorkerDied("killed", host="node1")
        except WorkerDied as error:
            raise RuntimeError("no result") from error
    except RuntimeError as error:
        text = failure.text(error)
    assert text.index("node1 WorkerDied: killed") < text.index("direct cause") < text.index("RuntimeError: no result")


def test_a_circle_of_causes_ends() -> None:
    one, other = HostLost("one"), HostLost("other")
    one.__context__, other.__context__ = other, one
    assert failure.is_from_pool(one)
    assert failure.text(one).endswith("HostLost: one")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def test_an_exception_that_cannot_be_printed_is_shown_without_its_text() -> None:
    error = Unprintable()
    error.__cause__ = RemoteTraceback(f"{HEADER}\n{FRAMES}", "node1")
    last = "node1 Unprintable: <exception str() failed>"
    assert failure.text(error).splitlines()[-1] == last
    assert failure.summary(broadcast_error("f", [error], [error]), "error: ").splitlines()[-1] == last


# ---- hooks


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("SKYFAB_TRACE", raising=False)


@pytest.mark.usefixtures("hooks")
def test_a_hook_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*args: object) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", own)
    failure.install()
    assert sys.excepthook is own


@pytest.mark.usefixtures("hooks")
def test_in_ipython_other_exceptions_are_shown_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers: list[Any] = []
    shown: list[object] = []
    shell = SimpleNamespace(
        custom_exceptions=(),
        set_custom_exc=lambda kinds, handler: handlers.append(handler),
        InteractiveTB=SimpleNamespace(structured_traceback=lambda *args, tb_offset: ["as ever"]),
        _showtraceback=lambda kind, error, lines: shown.append(lines),
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    failure.install()
    (handler,) = handlers
    handler(shell, ValueError, ValueError("own"), None, 1)
    handler(shell, HostLost, HostLost("gone", host="node1"), None, 1)
    assert shown == [["as ever"], ["node1 HostLost: gone"]]


# ---- whole programs

PROGRAM = """
import asyncio, threading, time
import skyfab as sky
import parts

@sky.function
def train(epochs):
    if sky.instance_info().rank == 1:
        parts.step(epochs)
    time.sleep(60)

if __name__ == "__main__":
    with sky.Compute("local", ranks=2, ui="none") as compute:
        {line}
"""
PARTS = """
def step(n):
    raise ValueError(f"bad batch in epoch {n}")

import time
import skyfab as sky

@sky.function
def values():
    yield 1
    time.sleep(60)

async def read(values):
    async for _ in values:
        pass
"""


def program(folder: Path, line: str) -> Path:
    (folder / "parts.py").write_text(PARTS)
    path = folder / "main.py"
    path.write_text(PROGRAM.format(line=line))
    return path


@pytest.mark.programs
def test_a_program_whose_rank_fails_shows_its_own_lines_and_the_cause_last(tmp_path: Path) -> None:
    path = program(tmp_path, "train(3) @ compute")
    found = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=170)
    lines = found.stderr.splitlines()
    assert found.returncode == 1
    assert lines[0] == HEADER
    assert lines[-2:] == ["train failed on 1 of 2 ranks; 1 stopped", "local[1] ValueError: bad batch in epoch 3"]
    files = re.findall(r'File "(.*)", line (\d+)', found.stderr)
    assert files == [(str(path), "14"), (str(path), "9"), (str(tmp_path / "parts.py"), "3")]


@pytest.mark.programs
def test_an_error_without_a_pool_shows_the_lines_of_the_program_only(tmp_path: Path) -> None:
    path = tmp_path / "main.py"
    path.write_text('import skyfab as sky\nsky.attach("nosuch", "local")\n')
    found = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=170)
    assert found.returncode == 1
    assert re.findall(r'File "(.*)", line (\d+)', found.stderr) == [(str(path), "2")]
    assert re.search(r"^UsageError: .*nosuch", found.stderr, re.MULTILINE)


@pytest.mark.programs
def test_a_thread_of_a_program_shows_the_same(tmp_path: Path) -> None:
    path = program(tmp_path, "t = threading.Thread(target=lambda: parts.step >> compute); t.start(); t.join()")
    found = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=170)
    assert found.returncode == 0
    assert found.stderr.startswith("in thread Thread-")
    assert found.stderr.splitlines()[-1] == (
        "UsageError: step is a plain function: decorate it with @sky.function, and write step(…)"
    )


@pytest.mark.programs
@pytest.mark.parametrize(
    "line",
    [
        "train(3) @ compute",
        "asyncio.run(parts.read(parts.values() >> compute))",
    ],
)
def test_ctrl_c_is_one_line(tmp_path: Path, line: str) -> None:
    path = program(tmp_path, f"print('go', flush=True); parts.step = print; {line}")
    with subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.readline() == "go\n"
        time.sleep(2)  # until it waits for the call
        os.kill(running.pid, signal.SIGINT)
        told = running.stderr.read()
    assert told == "interrupted: stopped on local\n"
    assert running.returncode == -signal.SIGINT
