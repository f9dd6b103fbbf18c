"""What every rank does, whoever started it: DDP steps of a small network. Plain ssh runs this file's text as it is.

It imports nothing but the standard library and torch, and torch only when it is called.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

DONE = "stepped"
"""What a rank prints when its first step is over."""


def first() -> None:
    """From nothing, but for the process group, to the end of the first step; then says so."""
    _trainer()()
    print(DONE, flush=True)


def lap(steps: int) -> float:
    """Takes so many steps; returns the median of their seconds. The step before them is where the ranks meet."""
    step, clock = _trainer(), time.perf_counter
    step()
    taken = []
    for _ in range(steps):
        started = clock()
        step()
        taken.append(clock() - started)
    return statistics.median(taken)


def _trainer() -> Callable[[], None]:
    """A step of training. The network stays in this process."""
    global _step
    if _step is None:
        _step = _made()
    return _step


_step: Callable[[], None] | None = None


def _made() -> Callable[[], None]:
    """Makes a network of 1.6 million weights, and what it learns from."""
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
    """By hand: joins the group that MASTER_ADDR and the others tell of, steps, then runs the laps it is told to."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    first()
    for line in sys.stdin:
        print(lap(int(line)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
