"""Tokens as they are generated: python examples/device/generate.py [--hosts=node1]

Each token depends on the one before, so a loop on this machine would wait for the network at every step. `sky.run_on`
runs the loop on the host instead, next to the weights, and yields the tokens to this program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import skyfab as sky

TEXT = "the quick brown fox jumps over the lazy dog. "
SEEN = 8


class NextByte(nn.Module):
    """Guesses the next byte of a text from the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 16)
        self.layers = nn.Sequential(nn.Linear(SEEN * 16, 64), nn.ReLU(), nn.Linear(64, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.token(tokens).flatten(-2))


@torch.no_grad()
def generate(model: NextByte, tokens: Tensor, count: int) -> Iterator[int]:
    """Runs on the host: `.item()` waits for its own device, not for the network."""
    for _ in range(count):
        best = model(tokens[-SEEN:]).argmax(-1, keepdim=True)
        yield best.item()
        tokens = torch.cat((tokens, best))


def learn(model: NextByte, text: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    windows = text.unfold(0, SEEN + 1, 1)
    for _ in range(40):
        loss = cross_entropy(model(windows[:, :-1]), windows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(hosts: str) -> None:
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute:
        device = compute.device()
        torch.manual_seed(0)
        model = NextByte().to(device)
        learn(model, torch.tensor(list(TEXT.encode() * 2), device=device))
        start = torch.tensor(list(TEXT[:SEEN].encode()), device=device)
        print(TEXT[:SEEN], end="")
        for token in sky.run_on(device, generate, model, start, 80):
            print(chr(token), end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses a device of the first host (default: this machine)")
    main(parser.parse_args().hosts)
