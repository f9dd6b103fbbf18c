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
DDP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("total", total.item())
dist.destroy_process_group()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {"beside.py": BESIDE, "script.py": SCRIPT, "ddp.py": DDP}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_script_runs_on_every_rank_with_its_arguments(project: Path) -> None:
    ran = skyfab(project, "run", "script.py", "--name", "ada lovelace")
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [
        f"local[{rank}] hello ada lovelace {rank} of 2 __main__" for rank in range(2)
    ]


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


def test_hosts_with_a_space_between_them_are_named_in_the_hint(project: Path) -> None:
    ran = skyfab(project, "run", "--hosts", "node1", "node2", "script.py", "1")
    assert ran.returncode == 2
    assert "skyfab run --hosts=node1,node2 script.py 1" in ran.stderr


@pytest.mark.torch
@pytest.mark.slow
def test_a_script_written_for_torchrun_needs_no_change(project: Path, lent_lab: Lab) -> None:
    pytest.importorskip("torch")
    ran = skyfab(project, "run", "--hosts=node1,node2", "ddp.py", inventory=lent_lab.inventory)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["node1[0] total 3.0", "node2[1] total 3.0"]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 1, ": it called sys.exit(3)"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import no_such_module", 1, "no_such_module"),
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
        ("ending.py", "pass", 0, set()),
        ("ending.py:main", "pass", 0, set()),
        ("ending.py", "sys.exit(3)", 1, set()),
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


def test_a_detached_run_that_waits_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    phase = SimpleNamespace(phase="waiting", text="1st, after ada's night")
    run: Any = SimpleNamespace(id="0123abcd4567", name="x.py", function="x.py", hosts=["node1"], others=[])
    run.phase = phase
    run.in_workdirs = list
    tell_how_to_attach(run)
    assert capsys.readouterr().err.startswith("run 0123abcd is waiting on node1: 1st, after ada's night\n")


def test_a_detached_run_says_who_uses_the_folder_and_what_will_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(id_: str, *folders: str) -> Any:
        hosts = [sky.Host(name=f"node{number}", workdir=folder) for number, folder in enumerate(folders, 1)]
        names = [host.name for host in hosts]
        about = {"id": id_, "name": "train.py", "function": "train.py", "hosts": names}
        return SimpleNamespace(**about, others=[], phase=None, in_workdirs=lambda: hosts)

    monkeypatch.chdir(tmp_path)
    run = started("0123abcd4567", "~/c/files/exp-4efb41e3.0123abcd", "~/c/files/exp-4efb41e3.0123abcd")
    run.others = [started("4fc985e0aaaa", "~/c/files/exp-4efb41e3", "~/c/files/exp-4efb41e3.4fc985e0")]
    tell_how_to_attach(run, None, ["ckpt/*", "log"])
    copied = "uses the folder of this project: this one works in a copy, ~/c/files/exp-4efb41e3.0123abcd"
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"node1: run 4fc985e0 (train.py) {copied}",
        f"node2: another run {copied}",
        *(f"  skyfab {task} 0123abcd" for task in ("attach", "logs", "stop")),
        f"skyfab attach 0123abcd fetches ckpt/*, log into {tmp_path} when the run has ended",
    ]
