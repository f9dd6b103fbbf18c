"""A digit classifier, trained on a remote device: python examples/device/classifier.py [--hosts=node1]

The loop is the same as for a GPU of this machine. The program waits once for each epoch, where it reads the loss; the
profile at the end shows this.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import skyfab as sky
from skyfab.demo import digits


def main(hosts: str) -> None:
    data = digits.load()
    loader = DataLoader(TensorDataset(data.x_train, data.y_train), batch_size=64, shuffle=True)
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute:
        device = compute.device()
        torch.manual_seed(0)
        model = digits.Classifier().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        print(f"before: {digits.evaluate(model, data.x_test, data.y_test):.0%} of the held-out digits")
        with sky.device.profile() as profile:
            for epoch in range(4):
                for x, y in sky.prefetch(loader, device):
                    loss = cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
        model.cpu()  # before the pool closes, which deletes its tensors
    print(profile)
    print(f"after: {digits.evaluate(model, data.x_test, data.y_test):.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses a device of the first host (default: this machine)")
    main(parser.parse_args().hosts)
