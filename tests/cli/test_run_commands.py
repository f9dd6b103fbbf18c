"""`skyfab run -m MODULE`, `skyfab run -- COMMAND` and `compute.command`: any program on every rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stage import traces
from stage.projects import skyfab
from stage.spot import Spot, until

import skyfab as sky
from skyfab.lab import Lab

pytestmark = pytest.mark.programs

OpenPool = Callable[..., sky.Compute]
MAIN = """
import argparse, os
from package import helper
from beside import greet

parser = argparse.ArgumentParser()
parser.add_argument("--name")
print(greet(parser.parse_args().name), helper.WORD, os.environ["RANK"], "of", os.environ["WORLD_SIZE"], __name__)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "helper.py").write_text("WORD = 'helped'\n")
    (tmp_path / "package" / "main.py").write_text(MAIN)
    (tmp_path / "beside.py").write_text("def greet(name):\n    return f'hello {name}'\n")
    (tmp_path / "apart").mkdir()  # without __init__.py
    (tmp_path / "apart" / "__main__.py").write_text("import sys\nprint('apart', *sys.argv[1:])\n")
    return tmp_path


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


# ---- modules


def test_a_module_runs_on_hosts_with_what_it_imports(project: Path, lab: Lab) -> None:
    words = ("run", "--hosts", "node1,node2", "-m", "package.main", "--", "--name", "ada lovelace")
    ran = skyfab(project, *words, inventory=lab.inventory)
    assert ran.returncode == 0, ran.stderr
    assert lines(ran.stdout) == [
        f"node{rank + 1}[{rank}] hello ada lovelace helped {rank} of 2 __main__" for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-m", "package.nosuch"], 2, "error: no module package.nosuch on this machine\nhint: looked in "),
        (["--", "sh", "-c", "exit 3"], 1, "sh ended with exit code 3"),
        (["--", "no-such-program", "x"], 1, "error: local[0]: command not found: no-such-program"),
    ],
)
def test_how_it_ends_is_how_the_command_ends(project: Path, words: list[str], code: int, said: str) -> None:
    ran = skyfab(project, "run", "--ranks=1", *words)
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr


OWN = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--hosts")
parser.add_argument("--when-free", action="store_true")
parser.parse_args()
"""


@pytest.mark.parametrize(
    ("text", "words", "note"),
    [
        ("", ["--hosts=node1"], "note: --hosts=node1 is passed to mine.py; options of skyfab go before the file\n"),
        (OWN, ["--hosts=node1", "--when-free"], ""),
    ],
)
def test_options_of_skyfab_that_a_script_gets_are_noted(project: Path, text: str, words: list[str], note: str) -> None:
    (project / "mine.py").write_text(text)
    ran = skyfab(project, "run", "--ranks=1", "mine.py", *words)
    assert ran.returncode == 0, ran.stderr
    assert note in ran.stderr
    assert ("note: " in ran.stderr) == bool(note)


# ---- commands


SHOW = """
import os, sys
import skyfab, package.helper

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
print(*sys.argv[1:], "|", *(os.environ[name] for name in names))
print("master", os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"], package.helper.WORD, file=sys.stderr)
"""


def test_a_command_runs_on_every_rank_with_torchruns_variables(project: Path, lab: Lab) -> None:
    (project / "package" / "show.py").write_text(SHOW)
    places = "{rank}/{world_size} {node}/{nodes} {local_rank} {unknown} {{rank}} {{rank}x {head}:{port}"
    words = ("run", "--hosts=node1,node2", "--ranks=2", "--", "python3", "-m", "package.show", places)
    ran = skyfab(project, *words, inventory=lab.inventory)
    assert ran.returncode == 0, ran.stderr
    found = [re.sub(r"\S+:\d+", "HEAD", line) for line in lines(ran.stdout)]
    assert found == [
        f"node{node + 1}[{rank}] {rank}/4 {node}/2 {rank % 2} {{unknown}} {{rank}} {{{rank}x HEAD"
        f" | {rank} 4 {rank % 2} 2 {node} {node}"
        for rank, node in ((0, 0), (1, 0), (2, 1), (3, 1))
    ]
    masters = set(re.findall(r"master (\S+) helped", ran.stderr))
    assert masters == {re.findall(r"\S+:\d+", ran.stdout)[0]}


# ---- the end

STUBBORN = "trap 'touch SPOT/term; exit 0' TERM; sleep 300 & touch SPOT/waits; while true; do sleep 0.05; done"
"""A program with a child, which notes that it was asked to end."""


def started(project: Path, lab: Lab, spot: Spot, *words: str) -> subprocess.Popen[str]:
    command = STUBBORN.replace("SPOT/", spot / "")
    argv = [sys.executable, "-m", "skyfab", "run", "--hosts=node1", *words, "--", "sh", "-c", command]
    env = {**os.environ, "SKYFAB_INVENTORY": str(lab.inventory)}
    return subprocess.Popen(argv, cwd=project, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_the_program_and_its_children(project: Path, namespaces: Lab, spot: Spot) -> None:
    process = started(project, namespaces, spot)
    spot.wait("waits")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert spot.notes("term")
    until(lambda: not traces.on(namespaces.hosts[0]), "the end of all its processes")


# ---- in Python


def test_a_command_is_a_call_like_any_other(open_pool: OpenPool, capfd: pytest.CaptureFixture[str]) -> None:
    pool = open_pool("openssh", 2, ui="plain")
    echo = pool.command(["echo", "rank {rank} of {world_size}"])
    assert echo @ pool == [0, 0]
    assert (echo > pool).result(60) == 0
    assert pool.command(["true"]) >> pool == 0
    assert sky.gather(pool.command(["true"]), pool.command(["true"])) >> pool == (0, 0)
    assert {"node1[0] rank 0 of 2", "node2[1] rank 1 of 2"} <= {*capfd.readouterr().out.splitlines()}
    with pytest.raises(sky.WorkerDied, match="sh ended with exit code 7") as found:
        pool.command(["sh", "-c", "exit 7"]) >> pool
    assert found.value.exitcode == 7
    with pytest.raises(sky.BroadcastError) as failed:
        pool.command(["sh", "-c", "kill -15 $$"]) @ pool
    assert {getattr(one, "exitcode", None) for one in failed.value.exceptions} == {-15}
    with pytest.raises(sky.HostUnfit, match="command not found: no-such-program"):
        pool.command(["no-such-program"]) >> pool
