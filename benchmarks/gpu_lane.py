"""How fast a tensor of 1 GiB on a GPU goes to a worker on this machine and back: ``python -m benchmarks.gpu_lane``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import skyfab as sky
from benchmarks.remote import identity, swallow
from skyfab.protocol import codec


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="of the tensor (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: 5)")
    options = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("error: no GPU", file=sys.stderr)
        return 2
    size = options.size << 20
    tensor = torch.arange(size // 8, device="cuda")
    on_cpu = tensor.cpu()

    def show(what: str, action: Callable[[], object], times: int = 1) -> None:
        taken = []
        for _ in range(options.rounds + 1):
            for one in (tensor, on_cpu):
                one.add_(1)  # other content: a repeated argument would not be sent
            torch.cuda.synchronize()
            started = time.perf_counter()
            action()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        seconds = median(taken[1:])
        print(f"{what:32} {seconds:6.2f} s   {times * size / seconds / 1e9:6.2f} GB/s", flush=True)

    payload = codec.dumps(tensor)
    show("pickle (GPU to memory)", lambda: codec.dumps(tensor))
    show("unpickle (memory to GPU)", lambda: codec.loads(payload.data, payload.buffers))
    with sky.Compute("local", image=sky.Image(python=sys.executable), ui="none") as compute:

        def call(function: Any, value: Any) -> Callable[[], object]:
            return lambda: function(value) >> compute

        assert bool((identity(tensor) >> compute == tensor).all())
        show("memory: out", call(swallow, on_cpu))
        show("memory: out and back", call(identity, on_cpu), times=2)
        show("GPU: out", call(swallow, tensor))
        show("GPU: out and back", call(identity, tensor), times=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
