"""A loop of Hugging Face's Accelerate on a remote device: python examples/device/accelerator.py [--hosts=node1]

The loop is the one for GPUs: `prepare` moves the model, and each batch as it is drawn. Gradients of two batches are
added up before a step. The losses are added up on the device, so the loop waits for the host once an epoch.

This machine needs it: uv pip install accelerate
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import skyfab as sky
from skyfab.demo import digits


def main(hosts: str, epochs: int) -> None:
    data = digits.load()
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute:
        compute.device()  # what Accelerate uses
        accelerator = Accelerator(gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        loader = DataLoader(TensorDataset(data.x_train, data.y_train), batch_size=64, shuffle=True, drop_last=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        print(f"on {accelerator.device}")
        for epoch in range(epochs):
            total = torch.zeros((), device=accelerator.device)
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.detach()
            print(f"epoch {epoch}: loss {total.item() / len(loader):.3f}")
        model = accelerator.unwrap_model(model).cpu().eval()
    right = (model(data.x_test).argmax(1) == data.y_test).float().mean()
    print(f"{right:.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses a device of the first host (default: this machine)")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    main(options.hosts, options.epochs)
