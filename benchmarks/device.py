"""Benchmark: a remote device, against the same PyTorch code where the tensors are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.facts import OPTIMIZED
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import Sample, alternate

_OPERATIONS = 2000
_FAR = 50
"""Milliseconds that a round trip takes longer."""
_TOKENS = 100


class Device:
    name = "device"
    about = "operations, training and generation on a remote device, against the same code on the host itself"

    def run(self, arena: Arena) -> Iterator[Result]:
        try:
            import torch
        except ImportError:
            raise Skip("torch is not installed") from None
        torch.set_num_threads(1)
        with arena.pool(arena.first, env={"OMP_NUM_THREADS": "1"}) as compute:
            device = compute.device("cpu")
            yield self._operation(arena, device)
            yield from self._encoder(arena, compute, device)
            yield self._upload(arena, compute, device)
            yield self._generation(arena, compute, device)

    def _operation(self, arena: Arena, device: Any) -> Result:
        import torch

        a, b = torch.ones(3, 4, device=device), torch.ones(3, 4, device=device)

        def once() -> float:
            began = time.thread_time()
            with torch.no_grad():
                for _ in range(_OPERATIONS):
                    a + b
            taken = time.thread_time() - began
            sky.synchronize()
            return taken / _OPERATIONS * 1e6

        once()
        values = [once() for _ in range(arena.scale.cold)]
        return Result(
            row=self.name,
            what="an operation, this program's time",
            unit="µs",
            ours=Sample(tuple(values)),
            bar=Bar(15 if OPTIMIZED else 18, on="value"),
        )

    def _encoder(self, arena: Arena, compute: sky.Compute, device: Any) -> Iterator[Result]:
        there, steps = sky.function(encoder_step), arena.scale.trained

        def far() -> float:
            arena.first_machine.delay(_FAR)
            try:
                return encoder_step(device, steps)
            finally:
                arena.first_machine.delay(None)

        ways = {"a training step of an encoder": lambda: encoder_step(device, steps)}
        if arena.lab.kind == "namespace":
            ways[f"the training step, {_FAR} ms away"] = far
        there("cpu", steps) >> compute  # warm-up
        encoder_step(device, steps)
        baseline, *ours = alternate(arena.scale.trainings, lambda: there("cpu", steps) >> compute, *ways.values())
        for what, taken in zip(ways, ours, strict=True):
            yield self._result(what, "ms", taken, baseline, Bar(1.2), 1e3)

    def _upload(self, arena: Arena, compute: sky.Compute, device: Any) -> Result:
        import torch

        data = torch.empty(arena.scale.size // 2 * 1024**2, dtype=torch.uint8)
        swallow = sky.function(len)

        def tensor() -> float:
            data.add_(1)
            return _timed(lambda: (data.to(device), sky.synchronize()))

        def argument() -> float:
            data.add_(1)
            return _timed(lambda: swallow(data) >> compute)

        tensor(), argument()
        seconds = alternate(arena.scale.device, tensor, argument)
        ours, baseline = (taken.each(lambda each: len(data) / each / 1e6) for taken in seconds)
        what = f"{len(data) // 1024**2} MiB to the device"
        return self._result(what, "MB/s", ours, baseline, Bar(0.8, "at least"), against="as an argument")

    def _generation(self, arena: Arena, compute: sky.Compute, device: Any) -> Result:
        there = sky.function(generate_alone)
        seconds = alternate(
            arena.scale.device,
            lambda: _timed(lambda: list(sky.run_on(device, generate, _TOKENS))),
            lambda: there(_TOKENS) >> compute,
        )
        ours, baseline = (taken.each(lambda each: _TOKENS / each) for taken in seconds)
        return self._result("tokens of a generation loop there", "1/s", ours, baseline, Bar(0.8, "at least"))

    def _result(
        self,
        what: str,
        unit: str,
        ours: Sample,
        baseline: Sample,
        bar: Bar,
        factor: float = 1.0,
        against: str = "on the host",
    ) -> Result:
        ours, baseline = (sample.each(lambda each: each * factor) for sample in (ours, baseline))
        return Result(row=self.name, what=what, unit=unit, ours=ours, baseline=baseline, against=against, bar=bar)


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def encoder_step(device: Any, steps: int) -> float:
    """Seconds of a step in which an encoder of four layers is trained; the loss is asked for after all of them."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(16, 64, 256).to(device)
    began = 0.0
    for number in range(steps + 2):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        if number % steps == 1:
            loss.item()
            began = began or time.perf_counter()
    return (time.perf_counter() - began) / steps


def generate(count: int) -> Iterator[int]:
    """A loop that waits for each token, as decoding does."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    cell, head = torch.nn.GRUCell(256, 256), torch.nn.Linear(256, 256)
    table = torch.nn.Embedding(256, 256)
    state, token = torch.zeros(1, 256), torch.tensor([1])
    with torch.no_grad():
        for _ in range(count):
            for _ in range(8):  # as many layers
                state = cell(table(token), state)
            token = head(state).argmax(1)
            yield int(token)


def generate_alone(count: int) -> float:
    """Seconds of the same loop where nobody is told of the tokens."""
    began = time.perf_counter()
    for _ in generate(count):
        pass
    return time.perf_counter() - began
