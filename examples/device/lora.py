"""LoRA with Hugging Face's PEFT on a remote device: python examples/device/lora.py [--hosts=node1]

A model that reads digits learns to read them upside down. Its weights stay as they are, on the host; adapters of a few
thousand numbers are trained, and only these come back.

This machine needs both: uv pip install peft transformers
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import skyfab as sky
from skyfab.demo import digits


def build() -> ViTForImageClassification:
    torch.manual_seed(0)
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return ViTForImageClassification(ViTConfig(**images, **size, initializer_range=0.1))


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """All data is on the device: nothing is sent but the instructions."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), device=x.device)
        loss = model(pixel_values=x[rows], labels=y[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.inference_mode():
        return (model(pixel_values=x).logits.argmax(1) == y).float().mean().item()


def main(hosts: str, steps: int) -> None:
    data = digits.load()
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute:
        device = compute.device()
        x, x_test = (images.view(-1, 1, 8, 8).to(device) for images in (data.x_train, data.x_test))
        y, y_test = data.y_train.to(device), data.y_test.to(device)
        model = build().to(device)
        train(model, x, y, steps)
        print(f"digits: {right(model, x_test, y_test):.0%}")
        print(f"upside down: {right(model, x_test.flip(2), y_test):.0%}")
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        train(model, x.flip(2), y, steps)
        trained = {name: value.cpu() for name, value in get_peft_model_state_dict(model).items()}
        print(f"upside down, with adapters: {right(model, x_test.flip(2), y_test):.0%}")
        every = sum(parameter.numel() for parameter in model.parameters())
        print(f"{sum(value.numel() for value in trained.values())} of {every} numbers are new")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses a device of the first host (default: this machine)")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    main(options.hosts, options.steps)
