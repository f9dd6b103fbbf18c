"""Training steps on a GPU of this machine, and the same on the remote device: ``python -m benchmarks.gpu_models``.

Both run in processes of their own, which take turns after every ten steps: a machine whose speed varies slows both.
Prints milliseconds of a step, the median ratio, and how far the losses of the two are apart. Needs torch with CUDA.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

WAYS = ("compile", "remote", "operators")
_TURNS = 9
_STEPS = 10
"""Of a turn. The first two turns, which compile, are not counted."""


def llama() -> tuple[Any, list[Any]]:
    """A model like Llama with 110M parameters in bfloat16 that returns its loss, and four batches for it."""
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads, layers, vocabulary, length = 768, 12, 12, 32000, 512

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(width, 2048, bias=False) for _ in range(2))
            self.down = nn.Linear(2048, width, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            def rotated(t: Any) -> Any:
                first, second = t.chunk(2, -1)
                return t * cos + torch.cat((-second, first), -1) * sin

            found = self.norm1(x)
            q, k, v = (
                layer(found).unflatten(-1, (heads, width // heads)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            found = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            x = x + self.out(found.transpose(1, 2).flatten(2))
            found = self.norm2(x)
            return x + self.down(functional.silu(self.gate(found)) * self.up(found))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
            angles = torch.outer(torch.arange(length).float(), 10000 ** (-torch.arange(0, 64, 2) / 64)).repeat(1, 2)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, x: Any, y: Any) -> Any:
            found = self.tokens(x)
            for block in self.blocks:
                found = block(found, self.cos, self.sin)
            return functional.cross_entropy(self.head(self.norm(found)).float().flatten(0, 1), y.flatten())

    torch.manual_seed(0)
    model = Llama().to(torch.bfloat16)
    return model, [tuple(torch.randint(0, vocabulary, (8, length)) for _ in range(2)) for _ in range(4)]


def resnet() -> tuple[Any, list[Any]]:
    """A ResNet-18 that returns its loss, with autocast to bfloat16, and four batches for it."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
            self.short: nn.Module = nn.Identity()
            if stride != 1 or before != width:
                self.short = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

        def forward(self, x: Any) -> Any:
            found = functional.relu(self.norm1(self.conv1(x)))
            return functional.relu(self.norm2(self.conv2(found)) + self.short(x))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
            widths = (64, 64, 128, 256, 512)
            blocks = [
                Block(before if again == 0 else width, width, 2 if again == 0 and width > 64 else 1)
                for before, width in itertools.pairwise(widths)
                for again in range(2)
            ]
            self.layers, self.head = nn.Sequential(*first, *blocks), nn.Linear(512, 1000)

        def forward(self, x: Any, y: Any) -> Any:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                return functional.cross_entropy(self.head(self.layers(x).mean((2, 3))), y)

    torch.manual_seed(0)
    model = ResNet()
    return model, [(torch.randn(64, 3, 128, 128), torch.randint(0, 1000, (64,))) for _ in range(4)]


MODELS = {"llama": llama, "resnet": resnet}


class Trainer:
    """Trains a model on a device of this program, in one of the `WAYS`."""

    def __init__(self, name: str, way: str, device: Any) -> None:
        import torch

        import skyfab as sky

        model, batches = MODELS[name]()
        model = model.to(device)
        self._batches = [tuple(part.to(device) for part in batch) for batch in batches]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._model = model
        if way == "compile":
            self._model = torch.compile(model)
        elif way == "remote" and device.type != "cuda":
            self._model = sky.remote(model)
        self.losses: list[float] = []

    def turn(self, every: int) -> float:
        """Milliseconds of a step; the loss is read after `every` steps."""
        import torch

        losses = []
        began = time.perf_counter()
        for step in range(1, _STEPS + 1):
            self._optimizer.zero_grad()
            loss = self._model(*self._batches[step % 4])
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
            if step % every == 0:
                loss.item()
        spent = time.perf_counter() - began
        self.losses += torch.stack(losses).float().tolist()
        return spent / _STEPS * 1000


def serve(name: str, way: str, where: str) -> None:
    """Takes turns when the process that has started this one asks for them."""
    import torch

    import skyfab as sky

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    with sky.Compute("local", image=sky.Image(python=sys.executable), ui="none") as compute:
        trainer = Trainer(name, way, compute.device("cuda") if where == "remote" else torch.device("cuda"))
        for line in sys.stdin:
            print(json.dumps(trainer.turn(int(line)) if int(line) else trainer.losses), file=answers, flush=True)


class Process:
    """A process that trains."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu_models", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, every: int) -> Any:
        """The milliseconds of a turn; with 0, all losses."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(every, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def compare(name: str, way: str) -> None:
    """Prints how a model trains on the GPU itself, and on the remote device."""
    both = [Process(name, "compile" if way == "compile" else "operators", "here"), Process(name, way, "remote")]
    for process in (*both, *both):
        process.ask(_STEPS)
    for every in (_STEPS, 1):
        turns = [[process.ask(every) for process in both] for _ in range(_TURNS)]
        here, remote = (statistics.median(column) for column in zip(*turns, strict=True))
        ratio = statistics.median(one[1] / one[0] for one in turns)
        print(
            f"{name} {way}, .item() every {every}: {here:.1f} ms, remote {remote:.1f} ms, {ratio:.2f} times", flush=True
        )
    losses = [process.ask(0) for process in both]
    apart = max(abs(one - other) / one for one, other in zip(*losses, strict=True))
    last = " and ".join(f"{some[-1]:.4f}" for some in losses)
    print(f"  losses of {len(losses[0])} steps: {last} at the end, at most {apart:.2%} apart", flush=True)
    for process in both:
        process.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(*sys.argv[1:])
    else:
        for each in MODELS:
            for one in WAYS:
                compare(each, one)
