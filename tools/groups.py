"""Runs the tests in several processes at once: most of them wait for hosts, and not for the processor.

Each process has a lab and a home folder of its own. Its output goes to a file, and is shown when all have ended; until
then one line says how far they are.

Tests that fail beside others are run a second time, alone, and named at the end: on a machine that is starved of
processor time a host can be late for any limit. A test that fails alone too has failed.
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
    "host/test_agent_fuzz.py": 17,
    "host/test_cancelled_calls.py": 9,
    "host/test_cuda.py": 7,
    "host/test_program_ends.py": 13,
    "host/test_spawning.py": 8,
    "calls/test_calls.py": 53,
    "calls/test_calls_under_attack.py": 11,
    "calls/test_code.py": 78,
    "calls/test_nesting.py": 5,
    "calls/test_refs.py": 31,
    "cli/test_cli.py": 29,
    "cli/test_run.py": 17,
    "cli/test_terminal.py": 50,
    "detached/test_detached.py": 13,
    "detached/test_folder.py": 14,
    "device/test_behaviours.py": 35,
    "device/test_device_links.py": 13,
    "device/test_faults.py": 9,
    "device/test_promises.py": 29,
    "device/test_refusals.py": 11,
    "device/test_regions.py": 13,
    "env/test_environments.py": 28,
    "env/test_gc.py": 28,
    "env/test_lock.py": 33,
    "env/test_probe.py": 22,
    "env/test_run_environment.py": 38,
    "env/test_sources.py": 15,
    "faults/test_freezes.py": 21,
    "faults/test_full_disks.py": 20,
    "faults/test_slow_links.py": 11,
    "files/test_files_on_hosts.py": 24,
    "fuzz/test_inventory_fuzz.py": 31,
    "inventory/test_inventory.py": 11,
    "lab/test_kinds.py": 32,
    "lab/test_lab.py": 23,
    "lab/test_programs.py": 9,
    "plugins/test_frameworks.py": 8,
    "plugins/test_hooks.py": 12,
    "pool/test_broadcasts.py": 19,
    "pool/test_errors.py": 18,
    "pool/test_fastpath.py": 31,
    "pool/test_gang.py": 23,
    "pool/test_leftovers.py": 85,
    "pool/test_lost_hosts.py": 14,
    "pool/test_networks.py": 21,
    "pool/test_output.py": 13,
    "pool/test_rendezvous.py": 7,
    "pool/test_scheduler.py": 6,
    "pool/test_shown.py": 5,
    "pool/test_stacks.py": 9,
    "pool/test_workdir.py": 31,
    "protocol/test_messages.py": 11,
    "session/test_bad_hosts.py": 65,
    "session/test_bootstrap.py": 15,
    "session/test_bundle.py": 17,
    "session/test_hostile_host.py": 15,
    "session/test_lines.py": 5,
    "session/test_logins.py": 71,
    "session/test_reader.py": 10,
    "session/test_setup.py": 24,
    "session/test_sharing.py": 8,
    "session/test_transports.py": 71,
    "session/test_waiting.py": 37,
    "test_benchmarks.py": 7,
    "test_digits.py": 8,
    "test_inv.py": 20,
    "test_scripts.py": 9,
    "test_security.py": 51,
    "ui/test_failure.py": 13,
    "ui/test_notebook.py": 17,
    "ui/test_ui.py": 5,
}
"""What files below tests/ take, measured once: those that take longest are run first."""
SLOW_SECONDS = {
    "host/test_agent_fuzz.py": 9,
    "host/test_program_ends.py": 17,
    "calls/test_calls.py": 46,
    "calls/test_calls_under_attack.py": 13,
    "calls/test_nesting.py": 13,
    "calls/test_refs.py": 64,
    "cli/test_cli.py": 58,
    "cli/test_run.py": 8,
    "cli/test_terminal.py": 32,
    "detached/test_detached.py": 109,
    "detached/test_folder.py": 11,
    "device/test_device_calls.py": 106,
    "device/test_device_examples.py": 117,
    "device/test_device_interrupts.py": 147,
    "device/test_device_links.py": 151,
    "device/test_device_replies.py": 13,
    "device/test_device_threads.py": 10,
    "device/test_faults.py": 49,
    "device/test_opinfo.py": 42,
    "device/test_profile.py": 16,
    "device/test_promises.py": 12,
    "device/test_random_programs.py": 14,
    "device/test_shared_memory.py": 11,
    "env/test_environments.py": 237,
    "env/test_probe.py": 10,
    "env/test_run_environment.py": 11,
    "faults/test_cut_openings.py": 53,
    "faults/test_cuts.py": 101,
    "faults/test_endurance.py": 12,
    "faults/test_freezes.py": 61,
    "faults/test_killed_clients.py": 16,
    "faults/test_losses.py": 55,
    "faults/test_model.py": 31,
    "faults/test_slow_links.py": 28,
    "files/test_files_on_hosts.py": 40,
    "fuzz/test_wire_fuzz.py": 24,
    "inventory/test_inventory.py": 8,
    "lab/test_kinds.py": 13,
    "lab/test_lab.py": 13,
    "plugins/test_ddp.py": 21,
    "plugins/test_elastic.py": 153,
    "plugins/test_frameworks.py": 48,
    "plugins/test_torch_group.py": 34,
    "pool/test_fastpath.py": 9,
    "pool/test_leftovers.py": 19,
    "pool/test_lost_hosts.py": 35,
    "pool/test_many_hosts.py": 56,
    "pool/test_networks.py": 57,
    "pool/test_output.py": 7,
    "pool/test_workdir.py": 15,
    "session/test_bare_hosts.py": 10,
    "session/test_hostile_host.py": 5,
    "session/test_sharing.py": 93,
    "session/test_waiting.py": 30,
    "test_digits.py": 9,
    "test_examples.py": 156,
    "test_pages.py": 260,
    "test_security.py": 39,
}
"""The same for their tests that are marked as slow."""
OTHERS = 2
SLOW_FOLDERS = ("device", "faults", "fuzz", "gpu", "lab", "plugins")
"""Not in the fast tier: each needs a framework, or minutes."""
AGAIN = 10
"""So many tests are run a second time. If more fail, it is not for want of processor time."""
EVERY = 30.0
"""Seconds between two lines about how far it is, where the output is no terminal."""
RESULTS = re.compile(r"^[.FEsxX]+(?:\s+\[ *\d+%\])?$")


def in_order(paths: Sequence[Path], seconds: Mapping[str, float]) -> list[str]:
    """The names of the files, those that take longest first: then all processes end at about the same time."""
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return sorted(names, key=lambda name: -seconds.get(name.removeprefix("tests/"), OTHERS))


def tests(*, fast: bool) -> list[Path]:
    """All files of tests; those that the fast tier leaves out are not even imported for it."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if not fast or path.parent.name not in SLOW_FOLDERS]


def run(python: str, count: int, options: Sequence[str]) -> int:
    """Runs all tests in so many processes; returns the worst exit code. Ctrl-C stops all, and shows what there is."""
    with tempfile.TemporaryDirectory(prefix="skyfab-tests-") as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(count)]
        failed = Path(folder) / "failed"
        running = []
        seconds = SLOW_SECONDS if any(word.startswith("slow") for word in options) else SECONDS
        (Path(folder) / "files").write_text("\n".join(in_order(tests(fast="--fast" in options), seconds)))
        pytest = [python, "-m", "pytest", "-q", *options]
        for log in logs:
            with log.open("wb") as file:
                words = [*pytest, "-p", "tools.sharing", f"--share={folder}"]
                running.append(subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
        interrupted = False
        try:
            _wait(running, logs, failed)
        except KeyboardInterrupt:
            interrupted = True
            for process in running:
                process.send_signal(signal.SIGINT)  # where it did not come from a terminal, which tells all
            for process in running:
                process.wait()
        for number, log in enumerate(logs, 1):
            print(f"---- process {number} of {count}", flush=True)
            sys.stdout.write(_worth_showing(log.read_text(errors="replace")))
        sys.stdout.flush()
        # Without tests (5) is no failure: the others may have taken all files.
        code = max((process.returncode for process in running if process.returncode != 5), default=5)
        names = [*dict.fromkeys(lines(failed))]
        if interrupted or code != 1 or not 0 < len(names) <= AGAIN:
            return code
        return _again(pytest, names)


def _again(pytest: Sequence[str], names: Sequence[str]) -> int:
    """Runs tests a second time, one after another and alone; returns the exit code of that."""
    print(f"---- failed beside others; again, alone: {len(names)}", flush=True)
    code = subprocess.run([*pytest, *names], cwd=ROOT, check=False).returncode
    for name in names:
        print(f"failed beside others{'' if code else ', passed alone'}: {name}", flush=True)
    return code


def lines(path: Path) -> list[str]:
    """Those of a file, none where there is no file yet."""
    return path.read_text().splitlines() if path.exists() else []


def _wait(running: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], failed: Path) -> None:
    """Shows how far the processes are, and names tests as they fail."""
    live, started, said = sys.stdout.isatty(), time.monotonic(), 0.0
    named = 0
    while any(process.poll() is None for process in running):
        time.sleep(0.5)
        elapsed = time.monotonic() - started
        for name in lines(failed)[named:]:
            print(f"\rfailed: {name}", flush=True)
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
    dots = [line for log in logs for line in log.read_text(errors="replace").splitlines() if RESULTS.match(line)]
    marks = "".join(line.partition(" ")[0] for line in dots)
    bad = marks.count("F") + marks.count("E")
    return f"{int(elapsed) // 60}:{int(elapsed) % 60:02d}  {len(marks):,} done, {bad} failed"


def _worth_showing(log: str) -> str:
    """The log without the lines of dots."""
    return "".join(f"{line}\n" for line in log.splitlines() if not RESULTS.match(line))
