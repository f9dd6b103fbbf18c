"""`skyfab run`: scripts that were written for torchrun, and functions, on every rank."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage.projects import skyfab

import skyfab as sky
from skyfab.cli.detach import broadcast, tell_how_to_attach
from skyfab.lab import Lab

pytestmark = pytest.mark.programs

BESIDE = "def greet(name):\n    return f'hello {name}'\n"
SCRIPT = """
import argparse, os
from beside import greet

parser = argparse.ArgumentParser()
parser.add_argument("--name")
print(greet(parser.parse_args().name), os.environ["RANK"], "of", os.environ["WORLD_SIZE"], __name__)

def main(*words):
    print("main", *words)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {"beside.py": BESIDE, "script.py": SCRIPT}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_script_runs_on_hosts(project: Path, lab: Lab) -> None:
    words = ("run", "--hosts=node1,node2", "--ranks=2", "script.py", "--", "--name=x")
    ran = skyfab(project, *words, inventory=lab.inventory)
    assert ran.returncode == 0, ran.stderr
    assert sorted(line.partition(" ")[0] for line in ran.stdout.splitlines()) == [
        "node1[0]",
        "node1[1]",
        "node2[2]",
        "node2[3]",
    ]


def test_a_function_of_a_file_runs(project: Path) -> None:
    (project / "other.py").write_text("def main(*words):\n    print('main', *words)\n")
    ran = skyfab(project, "run", "--ranks=1", "other.py:main", "a", "b c")
    assert ran.stdout == "local[0] main a b c\n", ran.stderr


def test_a_function_that_a_file_does_not_have_is_reported_before_connecting(project: Path) -> None:
    (project / "other.py").write_text("def main(*words):\n    print('main', *words)\n")
    ran = skyfab(project, "run", "--hosts=nowhere.invalid", "other.py:mian")
    assert ran.returncode == 2
    assert ran.stderr == "error: other.py has no function mian\nhint: did you mean other.py:main?\n"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 1, ": it called sys.exit(3)"),
    ],
)
def test_how_a_script_ends_is_how_the_command_ends(project: Path, text: str, code: int, said: str) -> None:
    (project / "end.py").write_text(text + "\n")
    ran = skyfab(project, "run", "end.py")
    assert ran.returncode == code
    assert said in ran.stderr


ENDING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

def late():
    time.sleep(0.5)
    open("thread", "w").write("data")

def main():
    atexit.register(lambda: open("atexit", "w").write("data"))
    threading.Thread(target=late).start()
    ThreadPoolExecutor().submit(print, "pool")

left_open = open("open", "w")
left_open.write("data")
if __name__ == "__main__":
    main()
    {last}
"""


@pytest.mark.parametrize(
    ("target", "last", "code", "missing"),
    [
        ("ending.py:main", "pass", 0, set()),
        ("ending.py", "raise ValueError", 1, {"thread"}),
    ],
)
def test_what_a_program_does_at_its_end_a_script_does_too(
    project: Path, target: str, last: str, code: int, missing: set[str]
) -> None:
    (project / "ending.py").write_text(ENDING.format(last=last))
    ran = skyfab(project, "run", "--ranks=1", target)
    assert ran.returncode == code, ran.stderr
    for name in {"thread", "atexit", "open"} - missing:
        assert (project / name).read_text() == "data", name


def test_a_broadcast_that_cannot_be_detached_yet_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arguments are still being sent."""

    def detach(name: str) -> None:
        future.set_result([1])
        raise sky.UsageError("no broadcast is running on every rank")

    def interrupted() -> list[int]:
        del future.result  # type: ignore[method-assign]
        raise KeyboardInterrupt

    future: Future[list[int]] = Future()
    future.result = lambda timeout=None: interrupted()  # type: ignore[method-assign]
    events = SimpleNamespace(unread=Future[None](), waiting=nullcontext())
    compute: Any = SimpleNamespace(submit=lambda call, on: future, detach=detach, events=events)
    monkeypatch.setattr("skyfab.cli.detach.asked", lambda is_over: "detach")
    assert broadcast(compute, sky.function(len)(""), name="night") == [1]
    assert capsys.readouterr().err == "not detached: no broadcast is running on every rank\n"


@pytest.mark.parametrize(
    ("name", "word"), [(None, "0123abcd"), ("night", "night"), ("a b", "'a b'"), ("-x", "0123abcd")]
)
def test_the_commands_for_a_detached_run_have_the_name_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str | None, word: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run: Any = SimpleNamespace(
        id="0123abcd4567", name=name or "train.py", hosts=["node1", "node2"], others=[], phase=None
    )
    run.function = "train.py"
    run.in_workdirs = list
    tell_how_to_attach(run, name)
    out, err = capsys.readouterr()
    assert out == "0123abcd\n", "always the id, for programs"
    assert err.splitlines() == [
        "run 0123abcd was started on node1, node2",
        *(f"  skyfab {task} {word}" for task in ("attach", "logs", "stop")),
    ]
