"""Benchmark: a remote device by distance: a training step and a token, by operators, as a region, and compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import skyfab as sky
from benchmarks import gpt
from benchmarks.arena import Arena
from benchmarks.result import Result, Skip
from benchmarks.sample import alternate

_SIZE = "tiny"


class Distance:
    name = "distance"
    about = "a training step and a token of a small GPT on a remote device, by round trip, against the host itself"

    def run(self, arena: Arena) -> Iterator[Result]:
        try:
            import torch
        except ImportError:
            raise Skip("torch is not installed") from None
        if arena.lab.kind != "namespace":
            raise Skip("a host of this lab cannot be delayed")
        torch.set_num_threads(1)
        with arena.pool(arena.first, env={"OMP_NUM_THREADS": "1"}) as compute:
            device = compute.device("cpu")
            ways = {**_steps(arena, device), **_tokens(arena, device)}
            there = sky.function(on_host)
            measured = {"step": "training step", "token": "token"}
            alone = {}
            for kind in measured:
                there(kind, 2) >> compute  # warm-up
                (alone[kind],) = alternate(
                    arena.scale.trainings, lambda kind=kind: there(kind, arena.scale.steps) >> compute
                )
            for distance in arena.scale.distances:
                if distance:
                    arena.first_machine.delay(distance)
                try:
                    taken = alternate(arena.scale.trainings, *ways.values())
                finally:
                    if distance:
                        arena.first_machine.delay(None)
                for (kind, how), ours in zip(ways, taken, strict=True):
                    yield Result(
                        row=self.name,
                        what=f"{measured[kind]}, {how}, {distance:g} ms away",
                        unit="ms",
                        ours=ours.each(lambda each: each * 1e3),
                        baseline=alone[kind].each(lambda each: each * 1e3),
                        against="on the host",
                    )


def _steps(arena: Arena, device: Any) -> dict[tuple[str, str], Callable[[], float]]:
    """What takes the seconds of a training step, by how it is made. Each is warm."""
    count = arena.scale.steps
    ways = {
        "operators": lambda model: model,
        "region": sky.remote,
        "compiled": lambda model: _compiled(arena, model),
    }
    found: dict[tuple[str, str], Callable[[], float]] = {}
    for name, change in ways.items():
        train = trainer(device, change)
        train(2, 1)
        found["step", f"{name}, .item() in every one"] = lambda train=train: train(count, 1)
        found["step", f"{name}, .item() after {count}"] = lambda train=train: train(count, count)
    return found


def _tokens(arena: Arena, device: Any) -> dict[tuple[str, str], Callable[[], float]]:
    """The same for a token of a generation loop, which needs the value of each."""
    count = arena.scale.steps
    model, window = _model(device)
    compiled = _compiled(arena, model)
    ways = {
        "operators": lambda: tokens(model, window, count),
        "region": lambda: sky.run_on(device, tokens, model, window, count),
        "compiled": lambda: tokens(compiled, window, count),
    }
    for way in ways.values():
        list(way())
    return {("token", name): lambda way=way: _timed(lambda: list(way())) / count for name, way in ways.items()}


def _compiled(arena: Arena, model: Any) -> Any:
    import torch

    return torch.compile(model, dynamic=False, options={"there": arena.scale.there})


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _model(device: Any) -> tuple[Any, Any]:
    """A model, and tokens to begin with."""
    import torch

    torch.manual_seed(0)
    return gpt.make(_SIZE).to(device), torch.zeros(1, gpt.SIZES[_SIZE]["length"], dtype=torch.int64).to(device)


def trainer(device: Any, change: Callable[[Any], Any]) -> Callable[[int, int], float]:
    """A function that takes the seconds of a step, of so many; the loss is asked for every so many of them."""
    import torch
    from torch.nn import functional

    model, window = _model(device)
    called = change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = window.expand(gpt.SIZES[_SIZE]["batch"], -1).contiguous()

    def train(steps: int, every: int) -> float:
        began = time.perf_counter()
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            loss = functional.cross_entropy(called(data).flatten(0, 1), data.flatten())
            loss.backward()
            optimizer.step()
            if number % every == 0:
                loss.item()
        return (time.perf_counter() - began) / steps

    return train


def tokens(model: Any, window: Any, count: int) -> Iterator[int]:
    """A loop that needs the value of each token, as one that ends with a certain token does."""
    import torch

    with torch.no_grad():
        for _ in range(count):
            token = model(window)[:, -1].argmax(1, keepdim=True)
            window = torch.cat([window[:, 1:], token], 1)
            yield int(token)


def on_host(kind: str, count: int) -> float:
    """Seconds of a step or a token where the tensors are."""
    import torch

    torch.set_num_threads(1)
    if kind == "step":
        train = trainer("cpu", lambda model: model)
        train(2, 1)
        return train(count, 1)
    model, window = _model("cpu")
    list(tokens(model, window, 2))
    return _timed(lambda: list(tokens(model, window, count))) / count
