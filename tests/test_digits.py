"""The demo: its data is whole, and it learns."""

from __future__ import annotations

import csv
import gzip

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


@pytest.mark.slow
def test_the_average_of_two_ranks_beats_90_percent_on_held_out_digits(
    data: digits.Split, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    for rank in range(2):
        monkeypatch.setattr(context, "_current", context.InstanceInfo(rank=rank, world_size=2))
        models.append(digits.train(model, data.x_train, data.y_train).model)
    assert not same(*models), "each rank has its own share"
    assert digits.evaluate(digits.average(models), data.x_test, data.y_test) > 0.9


# ---- models


def test_the_average_is_the_mean_and_counters_are_the_firsts() -> None:
    models = [torch.nn.BatchNorm1d(1) for _ in range(2)]
    for value, model in enumerate(models, start=1):
        torch.nn.init.constant_(model.weight, value)
        model.num_batches_tracked.fill_(value)
    mean = digits.average(models)
    assert mean.weight.item() == 1.5
    assert mean.num_batches_tracked.item() == 1
    assert [model.weight.item() for model in models] == [1, 2]
