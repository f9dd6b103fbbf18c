"""The work of every rank, however it is started: DDP steps of a small network. Plain ssh runs this file's text as is.

Imports only the standard library and torch, and torch only when it is called.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

DONE = "stepped"
"""A rank prints this after its first step."""


def first() -> None:
    """Makes the network and runs the first step, in an existing process group; then prints DONE."""
    _trainer()()
    print(DONE, flush=True)


def lap(steps: int) -> float:
    """Runs so many steps; returns the median of their seconds. One step before them synchronizes the ranks."""
    step, clock = _trainer(), time.perf_counter
    step()
    taken = []
    for _ in range(steps):
        started = clock()
        step()
        taken.append(clock() - started)
    return statistics.median(taken)


def _trainer() -> Callable[[], None]:
    """A function that runs a training step. The network is made once per process."""
    global _step
    if _step is None:
        _step = _made()
    return _step


_step: Callable[[], None] | None = None


def _made() -> Callable[[], None]:
    """Makes a network of 1.6 million weights, and its training data."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(64, 512), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    """Started by plain ssh: joins the process group of MASTER_ADDR, runs a step, then the laps that stdin asks for."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    first()
    for line in sys.stdin:
        print(lap(int(line)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
