"""Handwritten digits: the data, a small classifier, and its training on one rank or many.

The model is built on this machine, trained on hosts and evaluated on this machine again:

    import skyfab as sky
    from skyfab.demo import digits

    data = digits.load()
    model = digits.Classifier()
    with sky.Compute(hosts="gpu", plugins=[sky.plugins.torch()]) as compute:
        ranks = sky.function(digits.train)(model, data.x_train, data.y_train) @ compute
    print(digits.evaluate(ranks[0].model, data.x_test, data.y_test))
"""

from __future__ import annotations

import copy
import csv
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from skyfab.context import InstanceInfo, instance_info
from skyfab.demo import DIGITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Images to learn from and images held out, one flat row each, scaled to 0..1."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


class Epoch(NamedTuple):
    """How one pass over the data went. Accuracy is a fraction."""

    epoch: int
    loss: float
    accuracy: float

    def __str__(self) -> str:
        return f"loss {self.loss:.3f} accuracy {100 * self.accuracy:.1f} %"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """What training gives back."""

    model: nn.Module
    """On the CPU, wherever it was trained."""

    history: tuple[Epoch, ...]
    """One entry an epoch, seen from the training data."""


def load() -> Split:
    """All images. Every fifth of each digit is held out: the same ones everywhere, without random numbers."""
    with gzip.open(DIGITS, "rt", encoding="ascii", newline="") as file:
        _header, *rows = csv.reader(file)
    table = torch.tensor([[int(cell) for cell in row] for row in rows])
    x, y = table[:, 1:].float() / 16, table[:, 0]
    held_out = torch.zeros(len(y), dtype=torch.bool)
    held_out[y.argsort(stable=True)[::5]] = True
    return Split(x_train=x[~held_out], y_train=y[~held_out], x_test=x[held_out], y_test=y[held_out])


class Classifier(nn.Module):  # type: ignore[misc]  # torch is not there for mypy
    """A multi-layer perceptron: pixels in, one score per digit out."""

    def __init__(self, pixels: int = 64, hidden: Sequence[int] = (128,), classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(pixels, size), nn.ReLU()]
            pixels = size
        self.layers = nn.Sequential(*layers, nn.Linear(pixels, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def untrained() -> Classifier:
    """A classifier with the same initial weights every time, so that results can be compared."""
    torch.manual_seed(0)
    return Classifier()


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 10, lr: float = 1e-2, batch: int = 64) -> Trained:
    """Train a copy of `model`: on all of the data if alone, on this rank's share of it if not.

    Every rank is given all of the data. With a process group the ranks train one model together (DDP). `batch` is the
    ranks' batch together, so that more ranks make the same number of steps.
    """
    info = instance_info()
    device = _device(info.local_rank)
    x, y, model = x.to(device), y.to(device), copy.deepcopy(model).to(device).train()
    learner = _synced(model, device) if _together() else model
    optimizer = torch.optim.Adam(learner.parameters(), lr=lr)
    history = []
    for epoch, rows in enumerate(_shuffles(x, epochs, info), start=1):
        batches = rows.split(max(1, batch // info.world_size))
        history.append(Epoch(epoch, *_learn(learner, optimizer, x, y, batches)))
        # Ranks that train together all know the same: the first speaks for them.
        if info.rank == 0 or not _together():
            print(f"epoch {epoch}/{epochs} {history[-1]}", flush=True)
    return Trained(model=model.cpu(), history=tuple(history))


def _together() -> bool:
    """Whether a process group joins the ranks."""
    return bool(dist.is_available() and dist.is_initialized())


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A rank may be shown one GPU only, and share it with others.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _synced(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def _shuffles(x: Tensor, epochs: int, info: InstanceInfo) -> Iterator[Tensor]:
    """This rank's row numbers for each epoch, in an order that is the same in every run."""
    sampler = DistributedSampler(x, info.world_size, info.rank)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield torch.tensor(list(sampler), device=x.device)


def _learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, batches: Sequence[Tensor]
) -> tuple[float, float]:
    """Take one step a batch; return the loss and accuracy of all ranks that train together."""
    totals = torch.tensor([0.0, 0.0, sum(map(len, batches))], device=x.device)
    for rows in batches:
        scores = model(x[rows])
        loss = cross_entropy(scores, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals[0] += loss.detach() * len(rows)
        totals[1] += (scores.argmax(1) == y[rows]).sum()
    if _together():
        dist.all_reduce(totals)
    loss_sum, right, images = totals.tolist()
    return loss_sum / images, right / images


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The fraction of `x` that the model reads right, on the device where the model is."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    with torch.inference_mode():
        right = model(x.to(device)).argmax(1) == y.to(device)
    model.train(training)
    return float(right.float().mean())
