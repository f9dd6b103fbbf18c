"""A small GPT learns the bytes of a text: python examples/device/gpt.py [--hosts=node1]

The model and the loop do not know about hosts. `.item()` waits for the device, so it is called every 20 steps: in
between, the program runs ahead of the device, and the network does not slow it down.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import skyfab as sky

CONTEXT, WIDTH, HEADS, LAYERS = 32, 32, 4, 2
TEXT = __doc__ or ""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.1)
        self.head.weight = self.token.weight  # tied: one tensor, on the host too

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))


def main(hosts: str, steps: int) -> None:
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute:
        device = compute.device()
        torch.manual_seed(0)
        text = torch.tensor(list(TEXT.encode()), device=device)
        windows = text.unfold(0, CONTEXT + 1, 1)  # a view: nothing is copied
        model = GPT().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(steps + 1):
            rows = windows[torch.randint(len(windows), (8,), device=device)]
            scores = model(rows[:, :-1])
            loss = cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
        right = (scores.argmax(-1) == rows[:, 1:]).float().mean()
        print(f"{right.item():.0%} of the next bytes are right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses a device of the first host (default: this machine)")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    main(options.hosts, options.steps)
