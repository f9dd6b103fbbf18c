"""A small transformer is trained in bfloat16, compiled: python examples/device/compiled.py [--hosts=node1]

`torch.compile` works as usual: the model's forward, its backward and the optimizer's step are one instruction each,
which the host has compiled for its own device. `--there=eager` executes them uncompiled. CPUs without bfloat16 are much
faster with `--dtype=float32`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import skyfab as sky

LENGTH, WIDTH, DIGITS = 12, 32, 10


class Sorter(nn.Module):
    """Reads digits, and says which they are in ascending order."""

    def __init__(self) -> None:
        super().__init__()
        self.digit, self.place = nn.Embedding(DIGITS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits: Tensor) -> Tensor:
        return self.head(self.layers(self.digit(digits) + self.place.weight))


def main(hosts: str, steps: int, there: str, dtype: torch.dtype) -> None:
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute:
        device = compute.device()
        torch.manual_seed(0)
        model = Sorter().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

        def loss_of(digits: Tensor, wanted: Tensor) -> Tensor:
            with torch.autocast("sky", dtype=dtype, enabled=dtype != torch.float32):
                return cross_entropy(model(digits).flatten(0, 1), wanted.flatten())

        forward = torch.compile(loss_of, options={"there": there})
        update = torch.compile(optimizer.step, options={"there": there})
        with sky.device.profile() as profile:
            for step in range(steps + 1):
                digits = torch.randint(DIGITS, (32, LENGTH), device=device)
                wanted = digits.sort(1).values
                loss = forward(digits, wanted)
                optimizer.zero_grad()
                loss.backward()
                update()
                if step % 20 == 0:
                    print(f"step {step}: loss {loss.item():.3f}")
        right = (model(digits).argmax(-1) == wanted).float().mean()
        print(f"{right.item():.0%} of the digits are right; {profile.operations / (steps + 1):.0f} operations a step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses a device of the first host (default: this machine)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--there", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    chosen = parser.parse_args()
    main(chosen.hosts, chosen.steps, chosen.there, getattr(torch, chosen.dtype))
