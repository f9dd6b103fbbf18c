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
    "agent/test_agent_fuzz.py": 10,
    "agent/test_program_ends.py": 15,
    "calls/test_calls.py": 30,
    "calls/test_code.py": 30,
    "calls/test_refs.py": 30,
    "cli/test_cli.py": 30,
    "detached/test_detached.py": 80,
    "env/test_environments.py": 80,
    "env/test_gc.py": 15,
    "env/test_lock.py": 15,
    "env/test_probe.py": 15,
    "faults/test_cut_openings.py": 15,
    "faults/test_cuts.py": 50,
    "faults/test_freezes.py": 50,
    "faults/test_full_disks.py": 10,
    "faults/test_killed_clients.py": 15,
    "faults/test_losses.py": 25,
    "faults/test_model.py": 20,
    "faults/test_slow_links.py": 20,
    "device/test_device_examples.py": 100,
    "inventory/test_inventory.py": 10,
    "lab/test_kinds.py": 20,
    "lab/test_lab.py": 10,
    "plugins/test_ddp.py": 35,
    "plugins/test_elastic.py": 125,
    "plugins/test_frameworks.py": 40,
    "plugins/test_torch_group.py": 10,
    "pool/test_broadcasts.py": 10,
    "pool/test_errors.py": 10,
    "pool/test_fastpath.py": 15,
    "pool/test_gang.py": 15,
    "pool/test_leftovers.py": 60,
    "pool/test_lost_hosts.py": 20,
    "pool/test_many_hosts.py": 35,
    "pool/test_networks.py": 40,
    "pool/test_output.py": 20,
    "pool/test_stacks.py": 10,
    "pool/test_workdir.py": 35,
    "session/test_bad_hosts.py": 65,
    "session/test_bare_hosts.py": 15,
    "session/test_bootstrap.py": 15,
    "session/test_hostile_host.py": 15,
    "session/test_sharing.py": 25,
    "session/test_transports.py": 25,
    "session/test_waiting.py": 30,
    "test_examples.py": 55,
    "test_security.py": 40,
}
"""What files below tests/ take, measured once: for an even split, nothing else."""
OTHERS = 2
EVERY = 30.0
"""Seconds between two lines about how far it is, where the output is no terminal."""
RESULTS = re.compile(r"^[.FEsxX]+(?:\s+\[ *\d+%\])?$")


def split(count: int, paths: Sequence[Path]) -> list[list[str]]:
    """The files in so many groups that take about as long as each other: the longest first, to the emptiest.

    Within a group, files of one folder follow each other: they share hosts.
    """
    groups: list[tuple[float, list[str]]] = [(0.0, []) for _ in range(count)]
    for path in sorted(paths, key=lambda path: -seconds(path)):
        at = min(range(count), key=lambda at: groups[at][0])
        total, names = groups[at]
        groups[at] = (total + seconds(path), [*names, str(path.relative_to(ROOT))])
    return [sorted(names) for _, names in groups]


def seconds(path: Path) -> float:
    return SECONDS.get(path.relative_to(ROOT / "tests").as_posix(), OTHERS)


def tests() -> list[Path]:
    """All files of tests."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


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
