"""Weights that are never on this machine: python examples/device/load_there.py [--hosts=node1]

The model is built on the meta device, without memory. The host creates or reads the weights (`sky.load_on`) and keeps
them; this program trains and evaluates the model as if it were local.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import skyfab as sky
from skyfab.demo import digits


def weights(file: str) -> dict[str, torch.Tensor]:
    """The weights in a file of the host; new ones where it has none."""
    if Path(file).exists():
        return torch.load(file, weights_only=True)
    torch.manual_seed(0)
    return digits.Classifier(hidden=(256, 256)).state_dict()


def main(hosts: str, file: str) -> None:
    data = digits.load()
    with torch.device("meta"):
        model = digits.Classifier(hidden=(256, 256))
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute:
        device = compute.device()
        with sky.device.profile() as loading:
            model.load_state_dict(sky.load_on(device, weights, file), assign=True)
        size = sum(value.nbytes for value in model.parameters())
        print(f"{size} bytes of weights on {device}, {loading.bytes_sent + loading.bytes_received} over the network")
        print(f"before: {digits.evaluate(model, data.x_test, data.y_test):.0%} of the held-out digits")
        train(model, data, device)
        print(f"after: {digits.evaluate(model, data.x_test, data.y_test):.0%} of the held-out digits")
        sky.run_on(device, torch.save, dict(model.state_dict()), file)  # on the host, the tensors are local


def train(model: nn.Module, data: digits.Split, device: torch.device) -> None:
    x, y = data.x_train.to(device), data.y_train.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses a device of the first host (default: this machine)")
    parser.add_argument("--file", default="weights.pt", help="on the host; training continues from it if it exists")
    options = parser.parse_args()
    main(options.hosts, options.file)
