"""Runs the tests in several processes at once: most of them wait for hosts, not for the processor.

Each process has its own lab and home folder. Its output goes to a file, which is shown when all have ended; until then
one line shows the progress.

Tests that fail beside others are repeated, each alone: on a machine that is short of processor time a host can miss any
deadline. A test that passes only alone is a defect all the same. The last lines name such tests, and in CI more than
one in a thousand is a failure.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LONG = (
    "programs/test_others_programs.py",
    "test_pages.py",
    "env/test_environments.py",
    "test_examples.py",
    "plugins/test_elastic.py",
    "device",
    "detached/test_detached.py",
    "faults/test_cuts.py",
    "session/test_sharing.py",
    "pool/test_leftovers.py",
    "calls/test_code.py",
    "session/test_logins.py",
    "session/test_transports.py",
    "session/test_bad_hosts.py",
    "calls/test_refs.py",
    "faults/test_freezes.py",
    "cli/test_cli.py",
    "pool/test_networks.py",
    "pool/test_many_hosts.py",
    "faults/test_losses.py",
    "calls/test_calls.py",
    "faults/test_cut_openings.py",
    "test_security.py",
    "cli/test_terminal.py",
)
"""What takes longest below tests/, by default or with --slow: it is run first, then large files.

A folder stands for all its files, which then follow each other. Tests of a remote device share a pool for as long as
they do, and each new one has to import torch on two hosts.
"""
SLOW_FOLDERS = ("device", "faults", "fuzz", "gpu", "lab", "plugins")
"""Not in the fast tier: each needs a framework, or minutes."""
AGAIN = 10
"""At most this many tests are repeated. If more fail, a lack of processor time is not the reason."""
EVERY = 30.0
"""Seconds between two lines about the progress, if the output is not a terminal."""
RESULTS = re.compile(r"^[.FEsxX]+(?:\s+\[ *\d+%\])?$")


def in_order(paths: Sequence[Path]) -> list[str]:
    """The names of the files, those that take longest first: then all processes end at about the same time."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONG)}
    last = len(LONG)
    ordered = sorted(paths, key=lambda path: (places.get(path, places.get(path.parent, last)), -path.stat().st_size))
    return [path.relative_to(ROOT).as_posix() for path in ordered]


def tests(*, fast: bool) -> list[Path]:
    """All files of tests, or those of the fast tier: it does not even import the others."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if not fast or path.parent.name not in SLOW_FOLDERS]


def run(python: str, count: int, options: Sequence[str]) -> int:
    """Runs all tests in `count` processes; returns the worst exit code. Ctrl-C stops all, and shows their output."""
    pytest = [python, "-m", "pytest", "-q", *options]
    with tempfile.TemporaryDirectory(prefix="skyfab-tests-") as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(count)]
        failed = Path(folder) / "failed"
        (Path(folder) / "files").write_text("\n".join(in_order(tests(fast="--fast" in options))))
        running = []
        for log in logs:
            with log.open("wb") as file:
                # -rs: failures are named at the end, when it is known whether they also fail alone.
                words = [*pytest, "-rs", "-p", "tools.sharing", f"--share={folder}"]
                running.append(subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
        interrupted = False
        try:
            _wait(running, logs, failed)
        except KeyboardInterrupt:
            interrupted = True
            for process in running:
                process.send_signal(signal.SIGINT)  # if it did not come from a terminal, which signals all
            for process in running:
                process.wait()
        for number, log in enumerate(logs, 1):
            print(f"---- process {number} of {count}", flush=True)
            sys.stdout.write(_worth_showing(log.read_text(errors="replace")))
        sys.stdout.flush()
        # A process without tests (5) has not failed: the others may have taken all files.
        code = max((process.returncode for process in running if process.returncode != 5), default=5)
        names = [*dict.fromkeys(lines(failed))]
        if not code:
            _together(0, len(_marks(logs)))
        if interrupted or code != 1 or not 0 < len(names) <= AGAIN:
            print("".join(f"failed: {name}\n" for name in names), end="", flush=True)
            return code
        return _repeat(pytest, names, len(_marks(logs)))


def _repeat(pytest: Sequence[str], names: Sequence[str], total: int) -> int:
    """Runs tests a second time, each alone; returns the exit code of all tests together."""
    print(f"---- {len(names)} of {total:,} tests failed beside others: repeating each alone", flush=True)
    failed = [name for name in names if subprocess.run([*pytest, "-rs", name], cwd=ROOT, check=False).returncode]
    passed = [name for name in names if name not in failed]
    for name in passed:
        print(f"passed alone, failed beside others (a defect of the test or the code): {name}", flush=True)
    for name in failed:
        print(f"failed alone too: {name}", flush=True)
    repeated, tests = _together(len(passed), total)
    too_many = "CI" in os.environ and repeated > allowed(tests)
    if too_many:
        print(f"{repeated} of {tests:,} tests passed only alone: more than one in a thousand", flush=True)
    return 1 if failed or too_many else 0


def _together(passed: int, total: int) -> tuple[int, int]:
    """Adds the figures of this tier to those of the tiers before it, which are in the file that CI names."""
    name = os.environ.get("SKYFAB_REPEATED")
    if name is None:
        return passed, total
    with Path(name).open("a+") as file:
        file.write(f"{passed} {total}\n")
        file.seek(0)
        rows = [[int(word) for word in line.split()] for line in file]
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def allowed(total: int) -> int:
    """How many tests may need to be repeated: one in each thousand.

    >>> allowed(5700), allowed(400)
    (6, 1)
    """
    return -(-total // 1000)


def lines(path: Path) -> list[str]:
    """The lines of a file; none if it does not exist yet."""
    return path.read_text().splitlines() if path.exists() else []


def _wait(running: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], failed: Path) -> None:
    """Shows the progress, and names tests as they fail."""
    live, started, said = sys.stdout.isatty(), time.monotonic(), 0.0
    named = 0
    while any(process.poll() is None for process in running):
        time.sleep(0.5)
        elapsed = time.monotonic() - started
        for name in lines(failed)[named:]:
            print(f"\rfailed beside others: {name}", flush=True)
            named += 1
        if elapsed - said > (1.0 if live else EVERY):
            said = elapsed
            print(f"\r{progress(logs, elapsed)}", end="" if live else "\n", flush=True)
    print(f"\r{progress(logs, time.monotonic() - started)}", flush=True)


def progress(logs: Sequence[Path], elapsed: float) -> str:
    """
    >>> progress([], 61.0)
    '1:01  0 done, 0 failed'
    """
    marks = _marks(logs)
    bad = marks.count("F") + marks.count("E")
    return f"{int(elapsed) // 60}:{int(elapsed) % 60:02d}  {len(marks):,} done, {bad} failed"


def _marks(logs: Sequence[Path]) -> str:
    """One character for each test that has ended, as pytest prints them."""
    dots = [line for log in logs for line in log.read_text(errors="replace").splitlines() if RESULTS.match(line)]
    return "".join(line.partition(" ")[0] for line in dots)


def _worth_showing(log: str) -> str:
    """The log without the lines of dots."""
    return "".join(f"{line}\n" for line in log.splitlines() if not RESULTS.match(line))
