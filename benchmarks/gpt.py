"""A GPT that is trained with the same code on a device of this program, wherever that is."""

from __future__ import annotations

import time
from typing import Any

SIZES = {
    "124M": {"layers": 12, "heads": 12, "width": 768, "vocabulary": 50304, "length": 1024, "batch": 8},
    "tiny": {"layers": 2, "heads": 2, "width": 64, "vocabulary": 256, "length": 32, "batch": 2},
    "small": {"layers": 4, "heads": 4, "width": 128, "vocabulary": 256, "length": 64, "batch": 8},
}


def make(size: str) -> Any:
    """The model."""
    import torch
    from torch import nn
    from torch.nn import functional

    options = SIZES[size]
    width, heads, vocabulary, length = (options[key] for key in ("width", "heads", "vocabulary", "length"))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, time_, _ = x.shape
            parts = self.qkv(self.norm1(x)).split(width, 2)
            q, k, v = (part.view(batch, time_, heads, width // heads).transpose(1, 2) for part in parts)
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(found.transpose(1, 2).reshape(batch, time_, width))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(options["layers"]))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x: Any) -> Any:
            found = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
            for block in self.blocks:
                found = block(found)
            return self.head(self.norm(found))

    return GPT()


def train(
    device: Any, size: str, steps: int, every: int, *, autocast: bool, warm: int = 5
) -> tuple[float, list[float]]:
    """Seconds of a step, and the losses that were asked for: every so many steps."""
    import torch
    from torch.nn import functional

    device = torch.device(device)
    options = SIZES[size]
    torch.manual_seed(0)
    model = make(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type != "cpu")
    shape = (options["batch"], options["length"] + 1)
    data = torch.randint(0, options["vocabulary"], shape, generator=torch.Generator().manual_seed(1)).to(device)
    losses: list[float] = []

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            found = model(data[:, :-1])
            loss = functional.cross_entropy(found.reshape(-1, found.shape[-1]), data[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(warm):
        loss = step()
    losses.append(loss.item())
    began = time.perf_counter()
    for number in range(1, steps + 1):
        loss = step()
        if number % every == 0:
            losses.append(loss.item())
    losses.append(loss.item())
    return (time.perf_counter() - began) / steps, losses
