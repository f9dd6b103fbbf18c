"""Runs the tests in several processes at once: most of them wait for hosts, and not for the processor.

Each process has a lab and a home folder of its own. Its output goes to a file, and is shown when all have ended; until
then one line says how far they are.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SECONDS = {
    "agent": 110,
    "calls": 240,
    "cli": 100,
    "detached": 90,
    "env": 110,
    "faults": 400,
    "fuzz": 50,
    "lab": 130,
    "plugins": 330,
    "pool": 500,
    "session": 300,
    "test_benchmarks.py": 60,
    "test_examples.py": 90,
    "test_inv.py": 60,
    "test_security.py": 60,
}
"""What folders and files of tests take, measured once: for an even split, nothing else."""
OTHERS = 15
EVERY = 30.0
"""Seconds between two lines about how far it is, where the output is no terminal."""
RESULTS = re.compile(r"^[.FEsxX]+(?:\s+\[ *\d+%\])?$")


def split(count: int, paths: Sequence[Path]) -> list[list[str]]:
    """The paths in so many groups that take about as long as each other: the longest first, to the emptiest."""
    groups: list[tuple[float, list[str]]] = [(0.0, []) for _ in range(count)]
    for path in sorted(paths, key=lambda path: -SECONDS.get(path.name, OTHERS)):
        at = min(range(count), key=lambda at: groups[at][0])
        seconds, names = groups[at]
        groups[at] = (seconds + SECONDS.get(path.name, OTHERS), [*names, str(path.relative_to(ROOT))])
    return [names for _, names in groups]


def tests() -> list[Path]:
    """Folders and files below tests/ that have tests."""
    found = [path for path in sorted((ROOT / "tests").iterdir()) if path.is_dir() and any(path.glob("test_*.py"))]
    return [*found, *sorted((ROOT / "tests").glob("test_*.py"))]


def run(python: str, count: int, options: Sequence[str]) -> int:
    """Runs all tests in so many processes; returns the worst exit code. Ctrl-C stops all, and shows what there is."""
    with tempfile.TemporaryDirectory(prefix="skyfab-tests-") as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(count)]
        running = []
        for names, log in zip(split(count, tests()), logs, strict=True):
            with log.open("wb") as file:
                words = [python, "-m", "pytest", "-q", *options, *names]
                running.append(subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
        try:
            _wait(running, logs)
        except KeyboardInterrupt:
            for process in running:
                process.send_signal(signal.SIGINT)  # where it did not come from a terminal, which tells all
            for process in running:
                process.wait()
        for number, log in enumerate(logs, 1):
            print(f"---- process {number} of {count}", flush=True)
            sys.stdout.write(_worth_showing(log.read_text(errors="replace")))
        sys.stdout.flush()
    # Without tests (5) is no failure: an expression may select none of one group.
    return max((process.returncode for process in running if process.returncode != 5), default=5)


def _wait(running: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    live, started, said = sys.stdout.isatty(), time.monotonic(), 0.0
    while any(process.poll() is None for process in running):
        time.sleep(0.5)
        elapsed = time.monotonic() - started
        if elapsed - said > (1.0 if live else EVERY):
            said = elapsed
            print(f"\r{progress(logs, elapsed)}", end="" if live else "\n", flush=True)
    print(f"\r{progress(logs, time.monotonic() - started)}", flush=True)


def progress(logs: Sequence[Path], elapsed: float) -> str:
    """
    >>> progress([], 61.0)
    '1:01  0 done, 0 failed'
    """
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if RESULTS.match(line)]
    marks = "".join(line.partition(" ")[0] for line in lines)
    bad = marks.count("F") + marks.count("E")
    return f"{int(elapsed) // 60}:{int(elapsed) % 60:02d}  {len(marks):,} done, {bad} failed"


def _worth_showing(log: str) -> str:
    """The log without the lines of dots."""
    return "".join(f"{line}\n" for line in log.splitlines() if not RESULTS.match(line))
