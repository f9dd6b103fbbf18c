"""The demo: its data is whole, and it learns."""

from __future__ import annotations

import csv
import gzip
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyfab.demo import DIGITS

torch = pytest.importorskip("torch")
digits = pytest.importorskip("skyfab.demo.digits")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def data() -> digits.Split:
    return digits.load()


@pytest.fixture
def model() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return digits.Classifier()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- data


def test_the_shipped_file_is_whole() -> None:
    with gzip.open(DIGITS, "rt", encoding="ascii") as file:
        header, *rows = csv.reader(file)
    assert header == ["label", *(f"p{i}" for i in range(64))]
    assert len(rows) == 1797
    assert {len(row) for row in rows} == {65}
    assert {int(row[0]) for row in rows} == set(range(10))
    assert {int(cell) for row in rows for cell in row[1:]} == set(range(17))


def test_images_are_flat_rows_from_0_to_1(data: digits.Split) -> None:
    assert data.x_train.shape == (1437, 64)
    assert data.x_test.shape == (360, 64)
    for x in (data.x_train, data.x_test):
        assert x.dtype == torch.float32
        assert x.min() == 0
        assert x.max() == 1
    for y in (data.y_train, data.y_test):
        assert y.dtype == torch.int64
        assert y.unique().tolist() == list(range(10))


def test_a_fifth_of_each_digit_is_held_out_and_never_trained_on(data: digits.Split) -> None:
    assert torch.equal(data.x_test, digits.load().x_test), "the same ones every time"
    learned, held_out = ({tuple(row) for row in x.tolist()} for x in (data.x_train, data.x_test))
    assert len(learned) + len(held_out) == 1797 and not learned & held_out
    share = data.y_test.bincount() / (data.y_test.bincount() + data.y_train.bincount())
    assert torch.all((share - 0.2).abs() < 0.01)


# ---- training


def test_training_beats_90_percent_on_held_out_digits(data: digits.Split, model: torch.nn.Module) -> None:
    trained = digits.train(model, data.x_train, data.y_train)
    assert digits.evaluate(trained.model, data.x_test, data.y_test) > 0.9
    assert [epoch for epoch, _loss, _accuracy in trained.history] == list(range(1, 11))
    assert trained.history[-1].loss < trained.history[0].loss
    assert {parameter.device.type for parameter in trained.model.parameters()} == {"cpu"}


def test_training_is_repeatable_and_leaves_the_given_model_alone(
    data: digits.Split, model: torch.nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    before, state = pickle.dumps(model), torch.get_rng_state()
    one, other = (digits.train(model, data.x_train, data.y_train, epochs=1) for _ in range(2))
    assert same(one.model, other.model) and one.history == other.history
    assert same(model, pickle.loads(before)) and torch.equal(torch.get_rng_state(), state)
    assert re.fullmatch(r"(epoch 1/1 loss \d\.\d{3} accuracy \d+\.\d %\n){2}", capsys.readouterr().out)
    back = pickle.loads(pickle.dumps(one))
    assert same(back.model, one.model) and back.history == one.history


RANK = """
import sys, torch, torch.distributed as dist
import digits
from skyfab.demo import digits

rank, folder = int(sys.argv[1]), sys.argv[2]
context.enter(context.InstanceInfo(rank=rank, world_size=2, local_rank=rank))
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
data = digits.load()
model = torch.load(f"{folder}/model", weights_only=False)
trained = digits.train(model, data.x_train[:1436], data.y_train[:1436], epochs=2)
torch.save(trained, f"{folder}/trained{rank}")
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_with_a_process_group_two_ranks_train_as_one_would(
    data: digits.Split, model: torch.nn.Module, tmp_path: Path
) -> None:
    """Same gradients as one process with the whole batch; the first rank alone prints."""
    torch.save(model, tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=170)[0].count("\n") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert printed == [2, 0]

    first, second = (torch.load(tmp_path / f"trained{rank}", weights_only=False) for rank in range(2))
    alone = digits.train(model, data.x_train[:1436], data.y_train[:1436], epochs=2)
    assert same(first.model, second.model)
    assert first.history == second.history
    torch.testing.assert_close(first.model.state_dict(), alone.model.state_dict(), atol=1e-3, rtol=0)
    torch.testing.assert_close(first.history[-1][1:], alone.history[-1][1:], atol=1e-3, rtol=0)


# ---- models


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_the_models_mode_as_it_was(
    data: digits.Split, model: torch.nn.Module, training: bool
) -> None:
    model.train(training)
    assert 0 <= digits.evaluate(model, data.x_test, data.y_test) <= 1
    assert model.training is training
