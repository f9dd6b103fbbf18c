"""``python -m benchmarks.weight INVENTORY COUNT``: opens a pool; prints its memory, threads and open files as JSON."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import skyfab as sky
from benchmarks.memory import proportional, status
from benchmarks.remote import nothing


def main(inventory: str, count: int) -> dict[str, float]:
    """Opens a pool, runs a broadcast, and measures. Megabytes are millions of bytes."""
    with sky.Compute(inventory=inventory, nodes=count, ui="none") as compute:
        nothing() @ compute
        return {
            "hosts": count,
            "own": status("VmRSS") / 1e6,
            "ssh": sum(map(proportional, _children())) / 1e6,
            "threads": threading.active_count(),
            "files": len(list(Path("/dev/fd").iterdir())),
        }


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
