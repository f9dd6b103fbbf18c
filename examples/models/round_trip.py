"""A model is built on this machine, trained on a host in an environment made for it, and returned.

    python examples/models/round_trip.py node1
    python examples/models/round_trip.py node1 --index=https://mirror.example/torch

The host needs sshd and a shell: skyfab installs this machine's version of torch on it. `--index` names an index or a
folder with torch wheels; without it, skyfab selects a build for each host.
"""

from __future__ import annotations

import argparse
import sys

import nets
import torch
from torch import Tensor

import skyfab as sky
from skyfab.demo import digits


@sky.function
def train(net: nets.Net, x: Tensor, y: Tensor) -> tuple[nets.Net, str]:
    nets.learn(net, x, y, steps=120, lr=1e-2)
    return net, f"Python {sys.version.split()[0]} with torch {torch.__version__}"


def main(hosts: str, index: str | None) -> None:
    version = torch.__version__.partition("+")[0]
    indexes = [sky.PipIndex(index, packages=["torch"])] if index else []
    image = sky.Image(pip=[f"torch=={version}", "numpy"], pip_indexes=indexes)

    data = digits.load()
    torch.manual_seed(0)
    net = nets.Net()
    net.blocks[1].layer = net.blocks[0].layer  # tied: one set of weights in two places
    print(f"before: {nets.accuracy(net, data.x_test, data.y_test):.0%} of the held-out digits")
    with sky.Compute(hosts, image=image) as compute:
        net, where = train(net, data.x_train, data.y_train) >> compute
        print(f"trained on {compute.hosts[0].name}, {where}")
    print(f"after: {nets.accuracy(net, data.x_test, data.y_test):.0%} of the held-out digits")
    tied = net.blocks[0].layer.weight is net.blocks[1].layer.weight
    print(f"tied weights: {'still tied' if tied else 'no longer tied'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="?", default="local")
    parser.add_argument("--index", help="where torch comes from: an index's URL, or a folder with wheels")
    options = parser.parse_args()
    main(options.hosts, options.index)
