"""`skyfab sweep` on real hosts: every trial runs once, with its own folder and GPUs, and whatever ends is known."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import projects, traces
from stage.spot import Spot, until
from stage.typist import Typist

from skyfab.lab import Lab, LabHost
from skyfab.lab.process import LabProcess

pytestmark = pytest.mark.lab

SCRIPT = """
import os, sys, time
from pathlib import Path

import helper
import skyfab as sky

given = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
spot, seed = Path(os.environ["SPOT"]), given["seed"]
with open(spot / "begun", "a") as file:
    file.write(seed + "\\n")
sky.report(loss=helper.loss_of(seed), gpu=os.environ.get("CUDA_VISIBLE_DEVICES"), world=os.environ.get("WORLD_SIZE"))
print("trial", seed, "of", Path.cwd().name)
while (spot / "hold").exists() and not (spot / "go").exists():
    time.sleep(0.02)
if seed == "7" and not (spot / "mended").exists():
    raise ValueError("lost its way")
sky.report(loss=helper.loss_of(seed) / 2)
"""


class Project:
    """A folder with a script, the hosts for it, and the command."""

    def __init__(self, folder: Path, lab: Lab, spot: Spot) -> None:
        self.folder, self.spot, self.hosts = folder, spot, lab.hosts[:2]
        (folder / "trial.py").write_text(SCRIPT)
        (folder / "helper.py").write_text("def loss_of(seed):\n    return int(seed) / 10\n")
        self.inventory = folder / "inventory.toml"
        text = lab.inventory.read_text()
        self.inventory.write_text(text.replace("[defaults]\n", "[defaults]\nslots = 2\ngpus = [0, 1]\n"))

    def words(self, *words: str) -> list[str]:
        hosts = [] if any(word.startswith("--hosts=") for word in words) else ["--hosts=node1,node2"]
        return ["sweep", *hosts, f"--env=SPOT={self.spot / ''}", *words]

    def sweep(self, *words: str, code: int = 0) -> str:
        """Runs the command. Returns what it has printed to stdout, and keeps what it has printed to stderr."""
        done = projects.skyfab(self.folder, *self.words(*words), inventory=self.inventory)
        self.said = done.stderr
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout

    def type(self, command: str) -> str:
        """Runs a whole command line."""
        done = projects.skyfab(self.folder, *shlex.split(command)[1:], inventory=self.inventory)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def states(self, name: str = "trial", code: int = 0) -> dict[str, str]:
        """The state of each trial by its seed."""
        trials = json.loads(self.sweep(name, "--json=-", code=code))
        return {dict(word.split("=") for word in one["words"])["seed"]: one["state"] for one in trials}

    def begun(self) -> Counter[str]:
        """How often each trial has begun."""
        return Counter("".join(self.spot.notes("begun").values()).split())

    def process(self, seed: str) -> tuple[LabHost, LabProcess]:
        """Where a trial runs, and its process there, once it runs."""

        def found() -> tuple[LabHost, LabProcess] | None:
            every = [(host, process) for host in self.hosts for process in host.processes()]
            return next((one for one in every if f"seed={seed}" in one[1].cmdline), None)

        return until(found, f"trial {seed} runs")


@pytest.fixture
def project(tmp_path: Path, namespaces: Lab, spot: Spot) -> Iterator[Project]:
    one = Project(tmp_path, namespaces, spot)
    yield one
    for host in one.hosts:
        until(lambda host=host: not traces.on(host) and not traces.folders(host), f"the end of all on {host.name}")


def test_every_trial_runs_once_in_a_folder_of_its_own(project: Project, tmp_path: Path) -> None:
    shown = project.sweep("trial.py", "lr=1e-3,1e-4", "seed=1..3", "--csv=all.csv").splitlines()
    assert shown[0].split() == ["trial", "state", "host", "time", "loss", "gpu", "world"]
    assert [line.split()[:2] for line in shown[1:3]] == [
        ["0001-lr=1e-3-seed=1", "done"],
        ["0002-lr=1e-3-seed=2", "done"],
    ]
    assert "6 trials: 6 done" in project.said
    (fetch,) = re.findall(r"the folder of trial 1: (skyfab get --run=\w+ \S+/0001\S+)", project.said)
    project.type(f"{fetch} --to=first")
    assert [path.parent.name for path in (tmp_path / "first").rglob("log.txt")] == ["0001-lr=1e-3-seed=1"]
    assert project.begun() == {"1": 2, "2": 2, "3": 2}
    rows = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert [(row["lr"], row["seed"], row["loss"]) for row in rows][-1] == ("1e-4", "3", "0.15")
    assert {row["host"] for row in rows} == {"node1", "node2"}
    assert not any(row["world"] for row in rows)  # a trial is not a rank
    done = projects.skyfab(tmp_path, "get", "--run=trial", "--to=home", inventory=project.inventory)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "home" / "sweeps").iterdir() if (tmp_path / "home/sweeps").exists() else [tmp_path / "home"]
    logs = {path.parent.name: path.read_text() for path in folder.rglob("log.txt")}
    assert len(logs) == 6
    assert logs["0005-lr=1e-4-seed=2"] == "trial 2 of 0005-lr=1e-4-seed=2\n"
    (about,) = folder.rglob("0005-lr=1e-4-seed=2/trial.json")
    assert json.loads(about.read_text())["code"] == 0


def test_each_trial_has_gpus_of_its_own(project: Project) -> None:
    project.spot.leave("hold")
    project.sweep("trial.py", "seed=1..6", "--gpus=1", "--detach")
    assert "after a failure, no new trials begin unless --keep-going is given" in project.said
    until(lambda: project.begun().total() == 4, "a trial on each GPU")
    found = json.loads(project.sweep("trial", "--json=-"))
    assert [one["state"] for one in found] == ["running"] * 4 + ["waiting"] * 2
    project.spot.leave("go")
    found = json.loads(project.sweep("trial", "-f", "--json=-"))
    assert sorted((one["host"], one["values"]["gpu"]) for one in found[:4]) == [
        *(("node1", "0"), ("node1", "1"), ("node2", "0"), ("node2", "1")),
    ]
    assert project.begun().total() == 6
    project.sweep("trial.py", "seed=1", "--gpus=3", code=2)
    assert "no host has 3 GPUs for a trial\nhint: --gpus can be at most 2" in project.said


def test_a_share_of_a_gpu_limits_the_memory_of_torch(project: Project, tmp_path: Path) -> None:
    """Seen by a package of that name, which is asked for what torch's own does when CUDA is first used."""
    (tmp_path / "torch" / "cuda").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    lines = [
        "limits = []",
        "_lazy_call = lambda call: call()",
        "set_per_process_memory_fraction = lambda *a: limits.append(a)",
    ]
    (tmp_path / "torch" / "cuda" / "__init__.py").write_text("\n".join(lines))
    text = "import torch.cuda, sys, skyfab\nskyfab.report(limits=str(torch.cuda.limits), words=str(sys.argv[1:]))\n"
    (tmp_path / "capped.py").write_text(text)
    (found,) = json.loads(project.sweep("capped.py", "seed=1", "--gpus=0.5", "--json=-"))
    assert found["values"] == {"limits": "[(0.5, 0)]", "words": "['seed=1']"}


def test_trials_of_another_script_of_the_same_name_are_not_resumed(project: Project, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "says.py").write_text(f"import skyfab\nskyfab.report(of={name!r})\n")
        (found,) = json.loads(project.sweep(f"{name}/says.py", "seed=1", "--json=-"))
    (found,) = json.loads(project.sweep("a/says.py", "seed=1", "--resume", "--json=-"))
    assert "of 1 trial, 1 are done" in project.said
    assert found["values"] == {"of": "a"}
    (tmp_path / "says.py").write_text("import skyfab\nskyfab.report(of='c')\n")
    project.sweep("says.py", "seed=1", "--resume", code=2)
    assert "no run 'says' on these hosts" in project.said


@pytest.mark.slow
def test_a_failure_stops_new_trials_and_resume_repeats_what_is_not_done(project: Project) -> None:
    words = ("trial.py", "--name=night", "--slots=1", "seed=6..12")
    shown = project.sweep(*words, code=1)
    assert "failed (ValueError: lost its way)" in shown
    assert "repeat the command with --resume" in project.said
    assert "0002-seed=7/log.txt" in project.said
    states = project.states("night", code=1)
    assert states["7"] == "failed"
    assert "not started" in states.values()
    done = {seed for seed, state in states.items() if state == "done"}
    project.sweep(*words, "--resume", "--keep-going", code=1)
    assert {seed for seed, state in project.states("night", code=1).items() if state != "done"} == {"7"}
    runs = json.loads(project.type("skyfab runs --hosts=node1 --json"))
    assert "6 of 7 trials are done" in runs[0]["error"]
    project.type("skyfab get --run=night --to=home")
    logs = sorted(path.parent.name for path in (project.folder / "home").rglob("log.txt"))
    assert logs == [f"{number:04}-seed={number + 5}" for number in range(1, 8)], "also of trials that were not repeated"
    project.spot.leave("mended")
    project.sweep(*words, "seed=", code=2)
    project.sweep(*words[:-1], "seed=5..12", "--resume")  # with one more, in front of the others
    assert "of 8 trials, 6 are done" in project.said
    assert "0008-seed=5" in {Path(one["folder"]).name for one in json.loads(project.sweep("night", "--json=-"))}
    assert set(project.states("night").values()) == {"done"}
    begun = project.begun()
    assert begun["7"] == 3
    assert all(begun[seed] == 1 for seed in done)
    assert begun["5"] == 1
    project.sweep(*words[:-1], "seed=6..6", "other=1", "--resume")
    assert "of 1 trial, the last sweep had none" in project.said


def test_a_sweep_goes_on_when_the_program_that_started_it_is_killed(project: Project) -> None:
    project.spot.leave("hold")
    argv = [sys.executable, "-m", "skyfab", *project.words("trial.py", "seed=1..6")]
    environ = {**os.environ, "SKYFAB_INVENTORY": str(project.inventory)}
    with subprocess.Popen(argv, cwd=project.folder, env=environ, stderr=subprocess.PIPE, text=True) as program:
        until(lambda: project.begun().total() == 4, "a trial in each slot")
        program.kill()
    project.sweep("trial.py", "seed=1..6", "--resume", code=2)
    assert "sweep trial is still running" in project.said
    project.spot.leave("go")
    project.sweep("trial", "-f")
    assert project.begun() == {str(seed): 1 for seed in range(1, 7)}


def killed_with(project: Project, victim: LabHost) -> dict[str, str]:
    """Kills the driver on a host while it runs two of eight trials. Returns the states before the others go on."""
    project.spot.leave("hold")
    project.sweep("trial.py", "seed=1..4", "seed2=1..2", "--detach")
    until(lambda: project.begun().total() == 4, "a trial in each slot")
    trial = next(one for one in victim.processes() if any(word.startswith("seed=") for word in one.cmdline))
    (driver,) = [one for one in victim.processes() if one.pid == trial.ppid]
    os.kill(driver.outside, signal.SIGKILL)
    until(lambda: not traces.on(victim), f"the end of all on {victim.name}")
    project.spot.leave("go")
    project.sweep("trial", "-f", code=3)
    found = json.loads(project.sweep("trial", "--json=-", code=3))
    return {one["folder"][-4:] + str(one["trial"]): one["state"] for one in found}


@pytest.mark.slow
def test_what_a_killed_driver_has_begun_is_lost_and_repeated(project: Project) -> None:
    states = killed_with(project, project.hosts[1])
    assert Counter(states.values()) == {"lost": 2, "done": 6}
    before = project.begun()
    assert before.total() == 8
    project.sweep("trial.py", "seed=1..4", "seed2=1..2", "--resume")
    assert project.begun().total() == 10


@pytest.mark.slow
def test_without_rank_0_the_others_end_what_they_have_begun(project: Project) -> None:
    states = killed_with(project, project.hosts[0])
    assert Counter(states.values()) == {"lost": 2, "done": 2, "not started": 4}
    project.sweep("trial.py", "seed=1..4", "seed2=1..2", "--resume")
    assert set(project.states().values()) == {"done"}
    assert project.begun().total() == 10


@pytest.mark.parametrize("choice", ["stop", "detach"])
def test_ctrl_c_asks_whether_to_stop_or_detach(project: Project, choice: str) -> None:
    project.spot.leave("hold")
    words = [sys.executable, "-m", "skyfab", *project.words("trial.py", "seed=1..6")]
    person = Typist(words, project.folder, SKYFAB_INVENTORY=str(project.inventory))
    with person:
        person.sees(r"4 running")
        person.presses(b"\x03")
        person.sees(r"\[s\]top, \[d\]etach")
        person.types(choice)
        assert person.ends() == (130 if choice == "stop" else 0)
    if choice == "stop":
        assert "sweep trial was stopped on node1, node2: 4 stopped, 2 not started" in person.said
        states = project.states(code=1)
        assert Counter(states.values()) == {"stopped": 4, "not started": 2}
    project.spot.leave("go")
    if choice == "detach":
        assert "skyfab sweep trial" in person.said
        project.sweep("trial", "-f")
        assert project.begun().total() == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["night", "--resume"], "not a script (.py): night\nhint: skyfab sweep night shows it"),
        (["trial.py", "seed=1", "--gpus=1.5"], "invalid gpus='1.5': expected a whole number"),
        (["trial.py", "seed=1", "--resume", "--name=unknown"], "no run 'unknown'"),
    ],
)
def test_what_cannot_be_a_sweep_is_a_usage_error(project: Project, words: list[str], message: str) -> None:
    project.sweep(*words, code=2)
    assert message in project.said


ODD = """
import json, os
import skyfab as sky

sky.report(**{"time": 12.3, "state": "lost", "host": "h", "trial": 1, "n": "mine", "odd\\n\\x1b[2J\\udcff": 1})
sky.report(text="\\udcff")
sky.report(text="\\x1b[2J" * 100_000)
if os.path.basename(os.getcwd()) == "0002-n=2":
    with open("report.json", "w") as file:
        json.dump({"fine": 1, "list": [1], "deep": {}}, file)
"""


def test_whatever_trials_report_the_table_and_the_files_are_written(project: Project) -> None:
    (project.folder / "odd.py").write_text(ODD)
    shown = project.sweep("odd.py", "n=1..2", "--csv=all.csv", "--json=all.json")
    head, first, _ = shown.splitlines()
    assert head.split("  ")[0].rstrip() == "trial"
    assert re.match(r"0001-n=1 +done +node\d +0:00:\d\d +12.3 +lost +h +1 +mine +1 +\?$", first), first
    assert re.search(r"time +time \(reported\) +state \(reported\) +host \(reported\) +trial \(reported\) +n", head)
    assert "\x1b" not in shown
    row, other = csv.DictReader((project.folder / "all.csv").read_text(encoding="utf-8").splitlines())
    assert (row["trial"], row["state"], row["state (reported)"], row["n"], row["n (reported)"]) == (
        *("1", "done", "lost", "1", "mine"),
    )
    assert other["fine"] == "1"
    found = json.loads((project.folder / "all.json").read_text(encoding="utf-8"))
    assert found[0]["values"]["text"] == "?"
    assert found[1]["values"] == {"fine": 1}
    project.type("skyfab get --run=odd 'sweeps/*/0001*' --to=home")
    (log,) = (project.folder / "home").rglob("log.txt")
    assert "UserWarning: not reported: text: all values have" in log.read_text()


GROUP = """
import os, signal, subprocess, sys, time
from pathlib import Path

spot, (name, _, value) = Path(os.environ["SPOT"]), sys.argv[1].partition("=")
if name == "kills" and value == "2":
    os.killpg(0, signal.SIGTERM)
if name in ("saves", "ignores"):
    def save(*_):
        (spot / f"saved{value}").touch()
        sys.exit(int(value) % 2)
    signal.signal(signal.SIGTERM, save if name == "saves" else signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(500)", __file__])
    (spot / f"begun{value}").touch()
    time.sleep(500)
"""


def test_a_trial_that_ends_its_process_group_fails_alone(project: Project) -> None:
    (project.folder / "group.py").write_text(GROUP)
    project.sweep("group.py", "kills=1..6", "--keep-going", "--slots=1", "--json=all.json", code=1)
    found = json.loads((project.folder / "all.json").read_text())
    assert [one["state"] for one in found] == ["done", "failed", *["done"] * 4]
    assert found[1]["code"] == -signal.SIGTERM


@pytest.mark.parametrize("name", ["saves", "ignores"])
def test_a_sweep_that_is_stopped_leaves_no_process(project: Project, name: str) -> None:
    """Trials get SIGTERM, and may save what they have; the fixture looks for what is left."""
    (project.folder / "group.py").write_text(GROUP)
    project.sweep("group.py", f"{name}=1..4", "--detach")
    until(lambda: {f"begun{number}" for number in range(1, 5)} <= project.spot.names(), "all trials run")
    project.type("skyfab stop group")
    for host in project.hosts:
        until(lambda host=host: not traces.on(host), f"the end of all on {host.name}")
    saved = {note for note in project.spot.names() if note.startswith("saved")}
    assert saved == ({"saved1", "saved2", "saved3", "saved4"} if name == "saves" else set())
    found = json.loads(project.sweep("group", "--json=-", code=1))
    assert [one["state"] for one in found] == ["stopped"] * 4, "whatever their exit codes"


USED = """
import os, sys, time
from pathlib import Path

spot, name = Path(os.environ["SPOT"]), sys.argv[1].partition("=")[0]
with open(spot / f"used.{os.environ['CUDA_VISIBLE_DEVICES']}", "a") as file:
    file.write(f"+{name}\\n")
    file.flush()
    while (spot / "hold").exists() and not (spot / "go").exists():
        time.sleep(0.02)
    time.sleep(0.1)
    file.write(f"-{name}\\n")
"""


@pytest.mark.slow
def test_two_sweeps_take_turns_on_gpus_and_never_share_one(project: Project) -> None:
    share = "0.5"
    (project.folder / "used.py").write_text(USED)
    project.spot.leave("hold")
    for name in ("ada", "bob"):
        words = ("used.py", f"{name}=1..8", f"--gpus={share}", f"--name={name}", "--hosts=node1", "--detach")
        project.sweep(*words)
        until(lambda: {"used.0", "used.1"} <= project.spot.names(), "the first one runs on both GPUs")
    until(lambda: re.search(r"waiting .* bob ", project.type("skyfab runs --hosts=node1")), "the second one waits")
    project.spot.leave("go")
    for name in ("ada", "bob"):
        assert len(json.loads(project.sweep(name, "-f", "--json=-"))) == 8
    for gpu in (0, 1):
        running, order = Counter[str](), []
        for line in project.spot.notes(f"used.{gpu}")["node1"].split():
            running[line[1:]] += 1 if line[0] == "+" else -1
            assert len(+running) <= 1, "two sweeps on one GPU"
            assert running.total() <= 1 / float(share)
            order += [line[1:]] * (line[0] == "+")
        assert order.index("bob") <= 1 / float(share), "the first one has gone on although another one waited"


def test_what_a_trial_has_started_in_its_own_session_ends_before_the_next_trial(project: Project) -> None:
    text = """
import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.setsid()
    while True:
        time.sleep(0.01)
        with open(os.path.join(os.environ["SPOT"], "left"), "a") as file:
            file.write(sys.argv[1] + "\\n")
while not os.path.exists(path := os.path.join(os.environ["SPOT"], "left")) or sys.argv[1] not in open(path).read():
    time.sleep(0.01)
with open(path, "a") as file:
    file.write("end " + sys.argv[1] + "\\n")
time.sleep(0.5)
"""
    (project.folder / "forks.py").write_text(text)
    project.sweep("forks.py", "k=1..3", "--gpus=2", "--hosts=node1")
    (notes,) = project.spot.notes("left").values()
    lines = notes.splitlines()
    for number in (2, 3):
        first = lines.index(f"k={number}")
        assert f"k={number - 1}" not in lines[first:]


def test_shared_memory_of_a_trial_goes_with_it(project: Project) -> None:
    text = """
import os, sys
from multiprocessing.shared_memory import SharedMemory

with open(os.path.join(os.environ["SPOT"], "name" + sys.argv[1][2:]), "w") as file:
    file.write(SharedMemory(create=True, size=1).name)
os._exit(0)
"""
    (project.folder / "shares.py").write_text(text)
    project.sweep("shares.py", "n=1,2", "--hosts=node1")
    for number in (1, 2):
        (name,) = project.spot.notes(f"name{number}").values()
        assert not project.hosts[0].path(f"/dev/shm/{name}").exists()
