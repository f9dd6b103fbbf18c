"""Networks for the scripts in this folder: hosts import this file because the scripts do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Residual(nn.Module):
    """Adds what a layer finds to what came in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.layer(x))


class Net(nn.Module):
    """Reads digits: pixels in, one score per digit out."""

    def __init__(self, pixels: int = 64, width: int = 64, blocks: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.into = nn.Linear(pixels, width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.out = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.blocks(torch.relu(self.into(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.features(x))


def learn(net: nn.Module, x: Tensor, y: Tensor, *, steps: int, lr: float) -> float:
    """Takes `steps` steps, each on 256 rows; returns the last loss."""
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    loss = torch.zeros(())
    for step in range(steps):
        rows = torch.arange(256 * step, 256 * (step + 1)) % len(y)
        loss = cross_entropy(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The fraction that it reads right."""
    with torch.inference_mode():
        return (net(x).argmax(1) == y).float().mean().item()
