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
    "agent/test_agent_fuzz.py": 15,
    "agent/test_program_ends.py": 20,
    "agent/test_spawning.py": 10,
    "calls/test_calls.py": 90,
    "calls/test_calls_under_attack.py": 30,
    "calls/test_code.py": 50,
    "calls/test_nesting.py": 25,
    "calls/test_refs.py": 55,
    "cli/test_cli.py": 45,
    "cli/test_run.py": 15,
    "cli/test_terminal.py": 80,
    "detached/test_detached.py": 120,
    "detached/test_folder.py": 15,
    "device/test_behaviours.py": 20,
    "device/test_device_calls.py": 65,
    "device/test_device_examples.py": 105,
    "device/test_device_interrupts.py": 45,
    "device/test_device_links.py": 125,
    "device/test_device_replies.py": 15,
    "device/test_faults.py": 45,
    "device/test_many_devices.py": 10,
    "device/test_opinfo.py": 25,
    "device/test_promises.py": 25,
    "device/test_random_programs.py": 10,
    "env/test_environments.py": 180,
    "env/test_gc.py": 20,
    "env/test_lock.py": 15,
    "env/test_probe.py": 40,
    "env/test_run_environment.py": 30,
    "env/test_sources.py": 20,
    "faults/test_cut_openings.py": 20,
    "faults/test_cuts.py": 70,
    "faults/test_freezes.py": 60,
    "faults/test_full_disks.py": 15,
    "faults/test_killed_clients.py": 15,
    "faults/test_losses.py": 30,
    "faults/test_model.py": 15,
    "faults/test_slow_links.py": 30,
    "files/test_files_on_hosts.py": 35,
    "fuzz/test_wire_fuzz.py": 15,
    "inventory/test_inventory.py": 20,
    "lab/test_kinds.py": 25,
    "lab/test_lab.py": 25,
    "lab/test_programs.py": 10,
    "plugins/test_ddp.py": 65,
    "plugins/test_elastic.py": 110,
    "plugins/test_frameworks.py": 55,
    "plugins/test_hooks.py": 15,
    "plugins/test_torch_group.py": 20,
    "pool/test_broadcasts.py": 15,
    "pool/test_errors.py": 15,
    "pool/test_fastpath.py": 25,
    "pool/test_gang.py": 25,
    "pool/test_leftovers.py": 70,
    "pool/test_lost_hosts.py": 40,
    "pool/test_many_hosts.py": 45,
    "pool/test_networks.py": 25,
    "pool/test_output.py": 15,
    "pool/test_stacks.py": 10,
    "pool/test_workdir.py": 30,
    "protocol/test_messages.py": 15,
    "session/test_bad_hosts.py": 65,
    "session/test_bare_hosts.py": 10,
    "session/test_bundle.py": 10,
    "session/test_hostile_host.py": 25,
    "session/test_setup.py": 20,
    "session/test_sharing.py": 60,
    "session/test_transports.py": 75,
    "session/test_waiting.py": 40,
    "test_digits.py": 15,
    "test_examples.py": 55,
    "test_inv.py": 20,
    "test_pages.py": 15,
    "test_security.py": 55,
    "ui/test_failure.py": 15,
    "ui/test_ui.py": 15,
}
"""What files below tests/ take, measured once: for an even split, nothing else."""
OTHERS = 2
SLOW_FOLDERS = ("device", "faults", "gpu", "lab", "plugins")
"""Not in the fast tier: each needs a framework, or minutes."""
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


def tests(*, fast: bool) -> list[Path]:
    """All files of tests; those that the fast tier leaves out are not even imported for it."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if not fast or path.parent.name not in SLOW_FOLDERS]


def run(python: str, count: int, options: Sequence[str]) -> int:
    """Runs all tests in so many processes; returns the worst exit code. Ctrl-C stops all, and shows what there is."""
    with tempfile.TemporaryDirectory(prefix="skyfab-tests-") as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(count)]
        running = []
        for names, log in zip(split(count, tests(fast="--fast" in options)), logs, strict=True):
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
