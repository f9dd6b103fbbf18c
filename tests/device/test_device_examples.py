"""The examples of remote devices, run on hosts as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyfab.lab import Lab

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples" / "device"

pytestmark = [pytest.mark.lab, pytest.mark.slow]

Run = Callable[..., list[str]]


@pytest.fixture
def run(lent_lab: Lab, tmp_path: Path) -> Run:
    """``run("gpt", "node1")``: the lines that an example prints, with its device on a host of the lab."""

    def example(name: str, hosts: str, *options: str) -> list[str]:
        words = [sys.executable, str(EXAMPLES / f"{name}.py"), f"--hosts={hosts}", *options]
        env = {**os.environ, "SKYFAB_INVENTORY": str(lent_lab.inventory)}
        ran = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()

    return example


def percent(line: str) -> int:
    """The last percentage of a line."""
    return int(re.findall(r"(\d+)%", line)[-1])


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"loss (\d+\.\d+)$", line))]


def test_a_classifier_is_trained_and_comes_back(run: Run) -> None:
    before, *lines, after = run("classifier", "node1")
    assert percent(before) < 30 and percent(after) > 85
    assert len(losses(lines)) == 4
    assert " of it in 4 waits" in lines[4]
    assert lines[-1].split()[0] == "4" and "loss.item()" in lines[-1]


def test_a_gpt_learns_a_text(run: Run) -> None:
    *lines, right = run("gpt", "node1")
    first, *_, last = losses(lines)
    assert len(losses(lines)) == 4 and last < first / 2
    assert percent(right) > 25


def test_a_compiled_transformer_learns(run: Run) -> None:
    *lines, right = run("compiled", "node1", "--there=eager", "--dtype=float32", "--steps=60")
    assert losses(lines)[-1] < losses(lines)[0] / 2
    assert percent(right) > 50
    assert int(right.split()[-4]) <= 7


def test_a_model_on_two_hosts_learns(run: Run) -> None:
    first, second, *lines, right = run("two_hosts", "node1,node2")
    assert [first.split(":")[:2], second.split(":")[:2]] == [["sky", "0"], ["sky", "1"]]
    assert losses(lines)[-1] < losses(lines)[0]
    assert percent(right) > 75


def test_weights_are_never_here(run: Run) -> None:
    """And the second run finds on the host what the first has learnt."""
    size, before, after = run("load_there", "node1")
    held, moved = (int(word) for word in re.findall(r"\d{3,}", size))
    assert held > 300_000 and moved < 10_000
    assert percent(before) < 30 and percent(after) > 85
    _, again, _ = run("load_there", "node1")
    assert percent(again) == percent(after)


def test_tokens_come_from_a_loop_on_the_host(run: Run) -> None:
    (line,) = run("generate", "node1")
    assert len(line) == 88
    assert ("the quick brown fox jumps over the lazy dog. " * 2).startswith(line)


def test_the_trainer_uses_the_device(run: Run) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    *lines, right = run("trainer", "node1")
    first, *_, last = losses(lines)
    assert all(" on sky:0: " in line for line in lines if line.startswith("step")) and last < first / 2
    assert percent(right) > 75


def kernel(notebook: str, tag: str) -> str:
    """The program that a kernel executes: the cells with this tag, and those without any."""
    cells = json.loads((EXAMPLES / f"{notebook}.ipynb").read_text())["cells"]
    tags = {tag, None}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return "\n\n".join("".join(cell["source"]) for cell in code if cell["metadata"].get("tags", [None])[0] in tags)


def test_a_notebook_goes_on_in_another_kernel(lent_lab: Lab, tmp_path: Path) -> None:
    changes = {
        'HOSTS = "local"': 'HOSTS = "node1"',
        "DTYPE = torch.bfloat16": "DTYPE = torch.float32",
        "OPTIONS = {}": 'OPTIONS = {"there": "eager"}',
    }
    env = {**os.environ, "SKYFAB_INVENTORY": str(lent_lab.inventory)}
    found = []
    for tag in ("first", "second"):
        text = kernel("finetune", tag)
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after)
        words = [sys.executable, "-c", text]
        ran = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
        assert ran.returncode == 0, ran.stderr
        found.append(ran.stdout.splitlines())
    (*first, right), (*second, turned) = found
    assert losses(first)[-1] < losses(first)[0] / 2 and percent(right) > 50
    assert losses(second)[0] < losses(first)[0] / 2, "it goes on where the first kernel has ended"
    assert losses(second)[-1] < losses(second)[4] / 2 and percent(turned) > 50


def test_accelerate_uses_the_device(run: Run) -> None:
    pytest.importorskip("accelerate")
    place, *lines, right = run("accelerator", "node1")
    assert place == "on sky:0"
    assert losses(lines)[-1] < losses(lines)[0] / 2
    assert percent(right) > 85


def test_adapters_are_trained_and_nothing_else(run: Run) -> None:
    pytest.importorskip("peft")
    upright, before, after, size = run("lora", "node1")
    assert percent(upright) > 80 and percent(before) < 60 and percent(after) > 80
    new, every = (int(word) for word in re.findall(r"\d+", size))
    assert new < every / 8


def test_every_example_is_run() -> None:
    tried = set(re.findall(r'run\("(\w+)"', Path(__file__).read_text()))
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tried
