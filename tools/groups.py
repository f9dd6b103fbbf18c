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
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SECONDS = {
    "agent/test_agent_fuzz.py": 15,
    "agent/test_cancelled_calls.py": 10,
    "agent/test_cuda.py": 7,
    "agent/test_program_ends.py": 12,
    "agent/test_spawning.py": 6,
    "calls/test_calls.py": 49,
    "calls/test_calls_under_attack.py": 9,
    "calls/test_code.py": 79,
    "calls/test_refs.py": 27,
    "cli/test_cli.py": 18,
    "cli/test_run.py": 16,
    "cli/test_terminal.py": 49,
    "detached/test_detached.py": 8,
    "device/test_behaviours.py": 20,
    "device/test_device_calls.py": 26,
    "device/test_device_links.py": 10,
    "device/test_device_replies.py": 15,
    "device/test_device_threads.py": 7,
    "device/test_faults.py": 12,
    "device/test_profile.py": 6,
    "device/test_promises.py": 21,
    "device/test_random_programs.py": 11,
    "device/test_refusals.py": 7,
    "device/test_regions.py": 11,
    "env/test_environments.py": 22,
    "env/test_gc.py": 24,
    "env/test_lock.py": 15,
    "env/test_probe.py": 30,
    "env/test_run_environment.py": 33,
    "env/test_sources.py": 11,
    "faults/test_freezes.py": 15,
    "faults/test_full_disks.py": 6,
    "faults/test_slow_links.py": 14,
    "files/test_files_on_hosts.py": 12,
    "files/test_transfer.py": 5,
    "fuzz/test_inventory_fuzz.py": 12,
    "inventory/test_inventory.py": 13,
    "lab/test_kinds.py": 31,
    "lab/test_lab.py": 14,
    "lab/test_programs.py": 7,
    "plugins/test_frameworks.py": 9,
    "plugins/test_hooks.py": 17,
    "plugins/test_torch_group.py": 5,
    "pool/test_broadcasts.py": 14,
    "pool/test_errors.py": 22,
    "pool/test_fastpath.py": 35,
    "pool/test_gang.py": 30,
    "pool/test_leftovers.py": 122,
    "pool/test_lost_hosts.py": 34,
    "pool/test_networks.py": 12,
    "pool/test_output.py": 13,
    "pool/test_rendezvous.py": 5,
    "pool/test_shown.py": 6,
    "pool/test_stacks.py": 10,
    "pool/test_workdir.py": 35,
    "protocol/test_messages.py": 20,
    "protocol/test_mux.py": 8,
    "protocol/test_reconnect.py": 5,
    "session/test_bad_hosts.py": 58,
    "session/test_bootstrap.py": 7,
    "session/test_bundle.py": 9,
    "session/test_hostile_host.py": 23,
    "session/test_lines.py": 6,
    "session/test_logins.py": 92,
    "session/test_reader.py": 7,
    "session/test_setup.py": 16,
    "session/test_sharing.py": 14,
    "session/test_transports.py": 80,
    "session/test_waiting.py": 38,
    "test_benchmarks.py": 7,
    "test_digits.py": 9,
    "test_inv.py": 27,
    "test_public_names.py": 28,
    "test_scripts.py": 5,
    "test_security.py": 38,
    "ui/test_failure.py": 14,
    "ui/test_ui.py": 13,
}
"""What files below tests/ take, measured once: for an even split, nothing else."""
SLOW_SECONDS = {
    "agent/test_agent_fuzz.py": 7,
    "agent/test_program_ends.py": 14,
    "calls/test_calls.py": 19,
    "calls/test_calls_under_attack.py": 10,
    "calls/test_refs.py": 36,
    "cli/test_cli.py": 40,
    "cli/test_run.py": 11,
    "cli/test_terminal.py": 42,
    "detached/test_detached.py": 84,
    "detached/test_folder.py": 9,
    "device/test_device_calls.py": 32,
    "device/test_device_examples.py": 97,
    "device/test_device_interrupts.py": 44,
    "device/test_device_links.py": 77,
    "device/test_faults.py": 34,
    "device/test_opinfo.py": 22,
    "device/test_promises.py": 6,
    "env/test_environments.py": 110,
    "env/test_probe.py": 7,
    "env/test_run_environment.py": 5,
    "faults/test_cut_openings.py": 18,
    "faults/test_cuts.py": 81,
    "faults/test_endurance.py": 12,
    "faults/test_freezes.py": 57,
    "faults/test_killed_clients.py": 18,
    "faults/test_losses.py": 37,
    "faults/test_model.py": 15,
    "faults/test_slow_links.py": 11,
    "files/test_files_on_hosts.py": 19,
    "fuzz/test_wire_fuzz.py": 10,
    "inventory/test_inventory.py": 6,
    "lab/test_kinds.py": 10,
    "lab/test_lab.py": 9,
    "plugins/test_ddp.py": 36,
    "plugins/test_elastic.py": 161,
    "plugins/test_frameworks.py": 27,
    "plugins/test_torch_group.py": 17,
    "pool/test_leftovers.py": 12,
    "pool/test_lost_hosts.py": 27,
    "pool/test_many_hosts.py": 41,
    "pool/test_networks.py": 12,
    "pool/test_output.py": 6,
    "pool/test_stacks.py": 6,
    "pool/test_workdir.py": 15,
    "session/test_bare_hosts.py": 9,
    "session/test_hostile_host.py": 5,
    "session/test_sharing.py": 55,
    "session/test_waiting.py": 34,
    "test_examples.py": 163,
    "test_pages.py": 17,
    "test_security.py": 14,
}
"""The same for their tests that are marked as slow."""
OTHERS = 2
SLOW_FOLDERS = ("device", "faults", "gpu", "lab", "plugins")
"""Not in the fast tier: each needs a framework, or minutes."""
EVERY = 30.0
"""Seconds between two lines about how far it is, where the output is no terminal."""
RESULTS = re.compile(r"^[.FEsxX]+(?:\s+\[ *\d+%\])?$")


def split(count: int, paths: Sequence[Path], seconds: Mapping[str, float]) -> list[list[str]]:
    """The files in so many groups that take about as long as each other: the longest first, to the emptiest.

    Within a group, files of one folder follow each other: they share hosts.
    """
    groups: list[tuple[float, list[str]]] = [(0.0, []) for _ in range(count)]
    needed = {path: seconds.get(path.relative_to(ROOT / "tests").as_posix(), OTHERS) for path in paths}
    for path in sorted(paths, key=lambda path: -needed[path]):
        at = min(range(count), key=lambda at: groups[at][0])
        total, names = groups[at]
        groups[at] = (total + needed[path], [*names, str(path.relative_to(ROOT))])
    return [sorted(names) for _, names in groups]


def tests(*, fast: bool) -> list[Path]:
    """All files of tests; those that the fast tier leaves out are not even imported for it."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if not fast or path.parent.name not in SLOW_FOLDERS]


def run(python: str, count: int, options: Sequence[str]) -> int:
    """Runs all tests in so many processes; returns the worst exit code. Ctrl-C stops all, and shows what there is."""
    with tempfile.TemporaryDirectory(prefix="skyfab-tests-") as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(count)]
        running = []
        seconds = SLOW_SECONDS if any(word.startswith("slow") for word in options) else SECONDS
        for names, log in zip(split(count, tests(fast="--fast" in options), seconds), logs, strict=True):
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
