"""A model for each rank, and their average: python examples/training/shards.py [--hosts=node1,node2]

The ranks do not communicate while they train. Each has a copy of the model and its share of the digits; this machine
averages the copies and sends the average again. `plugins.torch` installs torch on hosts that lack it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import skyfab as sky
from skyfab.demo import digits


@sky.function
def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> tuple[nn.Module, int]:
    x, y = sky.shard(x, y, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, len(y)


def average(models: Sequence[nn.Module]) -> nn.Module:
    states = [model.state_dict() for model in models]
    mean = digits.Classifier()
    mean.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})
    return mean


def main(hosts: str) -> None:
    data = digits.load()
    torch.manual_seed(0)
    model = digits.Classifier()
    print(f"untrained: {digits.evaluate(model, data.x_test, data.y_test):.0%} of the held-out digits")
    ranks = 2 if hosts == "local" else "auto"
    with sky.Compute(hosts, ranks=ranks, plugins=[sky.plugins.torch()]) as compute:
        for number in range(1, 4):
            models, rows = zip(*(train(model, data.x_train, data.y_train, steps=15) @ compute), strict=True)
            model = average(models)
            alone = [f"{digits.evaluate(each, data.x_test, data.y_test):.0%}" for each in models]
            both = f"{digits.evaluate(model, data.x_test, data.y_test):.0%}"
            print(f"round {number}: {' and '.join(alone)} by {' and '.join(map(str, rows))} images, {both} together")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="the hosts to train on (default: two ranks on this machine)")
    main(parser.parse_args().hosts)
