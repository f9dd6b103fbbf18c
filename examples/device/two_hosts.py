"""A model on two hosts, half of its layers on each: python examples/device/two_hosts.py [--hosts=node1,node2]

`.to(device)` between the halves copies from one host to the other, directly if they can reach each other, and the
gradient returns the same way. One optimizer has the parameters of both.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import skyfab as sky
from skyfab.demo import digits


class Halves(nn.Module):
    """The first layers on one device, the others on another."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()).to(first)
        self.upper = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x).to(self.upper[0].weight.device))


def main(hosts: str) -> None:
    data = digits.load()
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute:
        first, second = (compute.device(on=compute.hosts[at].name) for at in (0, -1))
        torch.manual_seed(0)
        model = Halves(first, second)
        for half, device in ((model.lower, first), (model.upper, second)):
            print(f"{device}: {sum(weights.numel() for weights in half.parameters())} weights")
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x, y = data.x_train.to(first), data.y_train.to(second)  # each where it is needed
        for epoch in range(4):
            for rows in torch.randperm(len(y)).split(128):
                loss = cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
        with torch.no_grad():
            read = model(data.x_test.to(first)).argmax(1).cpu()
    print(f"{(read == data.y_test).float().mean().item():.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses the first and the last host (default: this machine)")
    main(parser.parse_args().hosts)
