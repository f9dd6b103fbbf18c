"""The examples of distributed training, run as a reader would run them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyfab.lab import Lab

EXAMPLES = Path(__file__).parents[1] / "examples" / "training"

Run = Callable[..., list[str]]


@pytest.fixture
def run(lent_lab: Lab, tmp_path: Path) -> Run:
    """``run("ddp", "node1,node2")``: the lines that an example prints, on hosts of the lab or on two local ranks."""

    def example(name: str, hosts: str = "") -> list[str]:
        words, env = [sys.executable, str(EXAMPLES / f"{name}.py")], dict(os.environ)
        if hosts:
            words.append(f"--hosts={hosts}")
            env["SKYFAB_INVENTORY"] = str(lent_lab.inventory)
        ran = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()

    return example


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def percent(line: str) -> int:
    """The last percentage of a line."""
    return int(re.findall(r"(\d+)%", line)[-1])


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"\d+\.\d+", line)]


def of_ranks(lines: list[str], hosts: str = "") -> dict[str, list[str]]:
    """What each rank has printed. Raises KeyError for one that has printed nothing."""
    names = [f"{host}[{rank}]" for rank, host in enumerate(hosts.split(",") if hosts else ["local", "local"])]
    said: dict[str, list[str]] = {}
    for line in lines:
        name, _, text = line.partition(" ")
        said.setdefault(name, []).append(text)
    return {name: said[name] for name in names}


@needs("torch")
@pytest.mark.lab
@pytest.mark.slow
def test_ddp_trains_one_model(run: Run) -> None:
    """Each rank has other images and so another loss, and all have the same weights."""
    hosts = "node1,node2"
    before, *lines, ranks, after = run("ddp", hosts)
    assert percent(before) < 30 and percent(after) > 85
    for said in of_ranks(lines, hosts).values():
        losses = [numbers(line)[0] for line in said]
        assert len(losses) == 5 and losses[-1] < losses[0] / 2
    assert ranks.startswith("2 ranks: ") and ranks.endswith("the same weights on all")
    assert len(set(numbers(ranks))) == 2


@needs("torch")
@pytest.mark.slow
def test_fsdp_leaves_each_rank_a_part(run: Run) -> None:
    *lines, parts, after = run("fsdp")
    for (said,) in of_ranks(lines).values():
        first, last = numbers(said)
        assert last < first / 2
    one, other, whole = (int(word) for word in re.findall(r"\d+", parts))
    assert one + other == whole and max(one, other) < 0.6 * whole
    assert percent(after) > 85


@needs("torch")
@pytest.mark.slow
def test_models_of_shards_become_one(run: Run) -> None:
    untrained, *rounds = run("shards")
    assert percent(untrained) < 30
    assert ["719 and 718 images" in line for line in rounds] == [True] * 3
    assert percent(rounds[-1]) > 90


@needs("jax")
@pytest.mark.lab
@pytest.mark.slow
def test_jax_is_one_program_over_all_ranks(run: Run) -> None:
    hosts = "node1,node2"
    *lines, ranks, after = run("jax_shards", hosts)
    for number, said in enumerate(of_ranks(lines, hosts).values()):
        assert said[-1].startswith(f"process {number} of 2: ")
        first, last = numbers(said[-1])
        assert last < first / 2
    assert ranks == "2 ranks agree on the loss of 1436 images"
    assert percent(after) > 85


@needs("keras", "jax")
@pytest.mark.slow
def test_keras_fits_shards(run: Run) -> None:
    *lines, one, other, both = run("keras_shards")
    for (said,), images in zip(of_ranks(lines).values(), (719, 718), strict=True):
        assert said.startswith(f"{images} images with jax: ")
        first, last = numbers(said)
        assert last < first / 2
    assert min(percent(one), percent(other), percent(both)) > 85


@needs("transformers", "accelerate", "torch")
@pytest.mark.slow
def test_the_trainer_keeps_the_ranks_together(run: Run) -> None:
    """Half of the steps that one rank would take, and the same weights at the end."""
    *lines, losses, after = run("hf_trainer")
    ends = [said[-1] for said in of_ranks(lines).values()]
    assert ends == [f"rank {rank} of 2 took 92 steps" for rank in range(2)]
    first, last = numbers(losses)
    assert last < first / 2 and losses.endswith("the same weights on all ranks")
    assert percent(after) > 80


def test_every_example_is_run() -> None:
    tried = set(re.findall(r'run\("(\w+)"', Path(__file__).read_text()))
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tried
