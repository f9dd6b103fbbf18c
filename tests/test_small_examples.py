"""The short examples, run as a reader would run them: on this machine, and on hosts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyfab.lab import Lab

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTED = {
    "hello": ["2.5"],
    "broadcast_shard": ["9 words for", "rank 1: ", "all: 9 words, 35 letters"],
    "gather": ["(0.2, 0.1)", "arrived: 0.1", "arrived: 0.3", "[0.01, 0.01, 0.01, 0.01, 0.01]"],
    "executor": ["4", "2262", "[1.0, 2.0, 3.0, 4.0]", "[25, 168]"],
    "gpu_info": ["no NVIDIA GPU"],
    "files": ["0.txt 4000"],
    "own_plugin": ["True True"],
    "forward": ["hello from"],
    "detached": ["[5", "skyfab logs count"],
    "generate": ["Look, the model stays", "AGAIN: THE MODEL STAYS"],
    "shared_state": ["every rank saw: True", "counter: "],
    "dask_array": ["sum: 999999000000", "squares: [0, 1, 4, 9, 16]"],
    "trial": ["loss 0.0", "y = 2."],
    "doctor_in_ci": ["checks: ", "failure: 0"],
}
"""What each prints, among other things."""
LONG = {"dask_array"}
"""Those whose processes import a framework."""
OF_HOSTS = {"broadcast_shard", "files", "forward", "detached", "shared_state"}
"""Those that show what several hosts do."""


def run(name: str, folder: Path, *hosts: str, **environ: str) -> str:
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), *hosts]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_the_first_lines_name_what_this_machine_needs(path: Path) -> None:
    """All imports are named, except those of skyfab[torch] and those that an image installs on a host."""
    text = path.read_text()
    words = [re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE), re.findall(r"pip=\[(.+?)\]", text)]
    there = {"skyfab", "torch", "numpy", *sys.stdlib_module_names, *(one.stem for one in path.parent.glob("*.py"))}
    needed = {"scikit-learn" if name == "sklearn" else name for name in words[0] if name not in there}
    found = re.search("uv pip install (.*)", ast.get_docstring(ast.parse(text)) or "")
    named = set(re.findall(r"[\w-]+", re.sub(r"\[\w+\]", "", found[1]))) if found else set()
    assert needed - named - {name.strip("\"'") for name in words[1]} == set()


@pytest.mark.programs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in PRINTED]
)
def test_on_this_machine(name: str, tmp_path: Path) -> None:
    if name == "gpu_info" and Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a GPU, and the example then prints another line")
    said = run(name, tmp_path)
    assert [text for text in PRINTED[name] if text not in said] == []


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OF_HOSTS))
def test_on_two_hosts(name: str, tmp_path: Path, lab: Lab) -> None:
    said = run(name, tmp_path, "node1" if name == "forward" else "node1,node2", SKYFAB_INVENTORY=str(lab.inventory))
    assert [text for text in PRINTED[name] if text not in said] == []
    if name == "forward":
        assert "node1" in said
    if name == "files":
        assert "1.txt 4000" in said


@pytest.mark.lab
@pytest.mark.slow
def test_tensorboard_is_installed_on_a_host_and_read_from_here(tmp_path: Path, lab: Lab) -> None:
    said = run("forward_tensorboard", tmp_path, "node1", SKYFAB_INVENTORY=str(lab.inventory))
    assert said.startswith("http://127.0.0.1:") and said.endswith("scalars: loss\n")


@pytest.mark.programs
@pytest.mark.slow
def test_a_grid_search(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    assert run("grid_search", tmp_path).splitlines()[0] == "1797 averages"


@pytest.mark.programs
@pytest.mark.slow
def test_a_study(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    said = run("study", tmp_path)
    assert said.startswith("40 trials, ") and "; the best x is " in said


@pytest.mark.lab
@pytest.mark.slow
def test_ray_has_a_node_on_each_host(tmp_path: Path, lent_lab: Lab) -> None:
    pytest.importorskip("ray")
    said = run("ray_tasks", tmp_path, "node1,node2", SKYFAB_INVENTORY=str(lent_lab.inventory))
    assert said.startswith(f"2 nodes at {lent_lab.hosts[0].address}:") and said.endswith(": 3.1\n")


@pytest.mark.lab
@pytest.mark.slow
def test_a_job_of_ci_ends_with_what_the_doctor_finds(lab: Lab) -> None:
    """A host that cannot be reached is a failure of the job, and an annotation that is one line."""
    words = [sys.executable, str(EXAMPLES / "doctor_in_ci.py"), "ada@127.0.0.1:1"]
    environ = {**os.environ, "SKYFAB_INVENTORY": str(lab.inventory), "GITHUB_ACTIONS": "true"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=170)
    assert done.returncode == 1, done.stderr
    annotation, last = done.stdout.splitlines()
    assert annotation.startswith("::error title=skyfab doctor::ada@127.0.0.1:1: ") and "%0Afix: " in annotation
    assert "failure: 1" in last
