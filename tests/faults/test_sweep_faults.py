"""A sweep of 200 trials while hosts are cut off, lose their driver or their power: each trial runs exactly once.

Or it is reported as lost, and `--resume` repeats it. The trials themselves write down on their host that they begin.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cable
import pytest
from stage import labs, projects
from stage.spot import until

from skyfab.lab import Lab, LabHost

TRIALS = 200
SCRIPT = """
import os, sys, time

import skyfab as sky

number = int(sys.argv[1].partition("=")[2])
with open(f"{os.environ['SKYFAB_WORKDIR']}/begun.{os.environ['SEED']}", "a") as file:
    file.write(f"{number}\\n")
    file.flush()
    os.fsync(file.fileno())
time.sleep(0.2)
sky.report(square=number * number)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """In place of the one of the other tests of faults."""
    with labs.start_for_calls(4) as lab:
        cable.settle(lab.hosts)
        yield lab


def begun(lab: Lab, seed: int) -> Counter[int]:
    """How often each trial has begun, on hosts that are up."""
    folders = [host.path(home) for host in lab.hosts for home in ("/root", f"/home/{host.user}")]
    files = [file for folder in folders for file in folder.glob(f".cache/skyfab/files/*/begun.{seed}")]
    return Counter(int(line) for file in files for line in file.read_text().split())


def drivers(host: LabHost) -> list[int]:
    """Processes that have started a trial which runs now, by their numbers on this machine."""
    processes = {one.pid: one for one in host.processes()}
    trials = [one for one in processes.values() if any(word.startswith("number=") for word in one.cmdline)]
    return [processes[one.ppid].outside for one in trials if one.ppid in processes]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_each_of_200_trials_runs_once_or_is_lost_and_repeated(lab: Lab, tmp_path: Path) -> None:
    seed = 1
    chance = random.Random(seed)
    (tmp_path / "square.py").write_text(SCRIPT)
    words = ["sweep", "square.py", f"number=1..{TRIALS}", "--slots=2", "--keep-going", f"--env=SEED={seed}"]
    words.append(f"--name=squares{seed}")

    def sweep(*words: str) -> tuple[int, str]:
        done = projects.skyfab(tmp_path, *words, inventory=lab.inventory, timeout=300)
        print(done.stderr)
        return done.returncode, done.stdout

    assert sweep(*words, "--detach")[0] == 0
    until(lambda: begun(lab, seed).total() >= 20, "some trials run")
    first, second, third, fourth = lab.hosts
    for host in (first, second, third):  # shorter than it takes to be noticed
        cable.silence([host])
        time.sleep(chance.uniform(0.5, 3))
        cable.restore([host])
    until(lambda: drivers(third), "a trial on the host whose driver is killed")
    os.kill(drivers(third)[0], signal.SIGKILL)
    fourth.kill()
    cable.silence([second])  # longer: it ends what it has begun, and comes back
    time.sleep(30)
    cable.restore([second])
    fourth.reboot()
    code, text = sweep("sweep", f"squares{seed}", "-f", "--json=-")
    trials = json.loads(text)
    assert [trial["trial"] for trial in trials] == list(range(1, TRIALS + 1))
    states = {trial["trial"]: trial["state"] for trial in trials}
    counts = begun(lab, seed)
    print(Counter(states.values()), "begun:", counts.total())
    assert set(states.values()) == {"done", "lost"}
    assert code == 3
    assert all(counts[number] == 1 for number, state in states.items() if state == "done")
    assert all(counts[number] <= 1 for number, state in states.items() if state == "lost")
    assert all(trial["values"] == {"square": trial["trial"] ** 2} for trial in trials if trial["state"] == "done")

    code, text = sweep(*words, "--resume", "--json=-")
    assert code == 0, text
    again = begun(lab, seed)
    assert all(again[number] - counts[number] == (state == "lost") for number, state in states.items())
