"""One model, trained by all ranks together (DDP): python examples/training/ddp.py [--hosts=node1,node2]

The process group is ready before the function's first line, and each rank learns from its share of the digits.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import skyfab as sky
from skyfab.demo import digits


@sky.function
def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> tuple[nn.Module, list[float]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the current GPU is this rank's own
    x, y = (part.to(device) for part in sky.shard(x, y, shuffle=True, drop_last=True))
    learner = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2)
    losses = []
    for epoch in range(epochs):
        for rows in torch.arange(len(y)).split(64):
            loss = cross_entropy(learner(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()  # averages the gradients of all ranks
            optimizer.step()
        losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return model.cpu(), losses


def main(hosts: str) -> None:
    data = digits.load()
    torch.manual_seed(0)
    model = digits.Classifier()
    print(f"before: {digits.evaluate(model, data.x_test, data.y_test):.0%} of the held-out digits")
    ranks = 2 if hosts == "local" else "auto"
    with sky.Compute(hosts, ranks=ranks, plugins=[sky.plugins.torch()]) as compute:
        models, losses = zip(*(train(model, data.x_train, data.y_train, epochs=5) @ compute), strict=True)
    weights = [nn.utils.parameters_to_vector(each.parameters()) for each in models]
    same = all(torch.equal(weights[0], other) for other in weights)
    last = " ".join(f"{each[-1]:.3f}" for each in losses)
    print(f"{len(models)} ranks: losses {last}, {'the same' if same else 'different'} weights on all")
    print(f"after: {digits.evaluate(models[0], data.x_test, data.y_test):.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="the hosts to train on (default: two ranks on this machine)")
    main(parser.parse_args().hosts)
