"""`./inv bench --peers`: its tables, its chart, and what happens with peers that cannot be installed or that hang."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import chart
from benchmarks.arena import Arena
from benchmarks.peers import __main__ as program
from benchmarks.peers import environment as environments
from benchmarks.peers import report
from benchmarks.peers.contest import Contest
from benchmarks.peers.contestants import CONTESTANTS, OURS, Contestant
from benchmarks.peers.environment import Environment
from benchmarks.peers.jobs import PROGRAMS, SESSIONS, TASTE, Job
from benchmarks.peers.program import Failed, Session, run
from benchmarks.scale import TASTE as TASTE_OF_OTHERS
from skyfab.lab import Lab
from tools.bootstrap import SetupError

ROOT = Path(__file__).resolve().parent.parent
FACTS = {"cores": 2, "arch": "aarch64", "python": "3.11.7", "ssh": "OpenSSH_9", "cipher": "aes", "load": 0.5}


# ---- the document, its tables and its chart


def contest(seconds: dict[tuple[str, str], list[float]], reasons: dict[tuple[str, str], str]) -> Contest:
    return Contest(None, None, None, TASTE, seconds=seconds, reasons=reasons)


def found() -> dict[str, object]:
    """A run with two jobs: in one, a peer is faster than skyfab, and another did not finish."""
    seconds = {
        ("command", OURS): [0.4, 0.4],
        ("command", "ssh"): [0.1, 0.1],
        ("map", OURS): [0.05],
        ("map", "execnet"): [0.2],
        ("map", "Dask"): [5.0],
    }
    reasons = {("command", "fabric"): "did not finish in 60 s"}
    able = [each for each in CONTESTANTS if each.name in (OURS, "ssh", "fabric", "execnet", "Dask")]
    peers = [{"name": each.name, "version": "1.0", "why": ""} for each in able]
    peers.append({"name": "Monarch", "version": "", "why": "no wheel for this machine"})
    return report.document(contest(seconds, reasons), able, peers, FACTS, ["command", "map"])


def test_a_table_has_the_median_and_how_many_times_ours_it_is() -> None:
    text = "\n".join(report.text(found()))
    assert "  ssh                  0.100 s ±0%       0.25×\n  skyfab               0.400 s ±0%       1.00×" in text
    assert "  execnet              0.200 s           4.00×" in text
    assert "  fabric          did not finish in 60 s" in text
    assert "skyfab 1.0, ssh 1.0" in text
    assert "Monarch does not take part: no wheel for this machine" in text


def test_a_document_has_the_shape_that_other_rows_have() -> None:
    document = json.loads(json.dumps(found()))
    first = document["results"][0]
    assert set(first) == {"row", "what", "unit", "ours", "against", "baseline", "ratio", "bar", "verdict"}
    assert (first["row"], first["against"], first["ratio"]["median"]) == ("command", "ssh", pytest.approx(4))
    assert document["missing"] == [{"row": "command", "against": "fabric", "why": "did not finish in 60 s"}]


def test_the_chart_shows_who_is_faster_and_who_failed() -> None:
    picture = str(chart.drawn(found()))
    assert picture.index(">ssh<") < picture.index(">skyfab<"), "the fastest is first"
    assert "0.100 s · 0.25×" in picture
    assert "5.00 s · 100×, cut" in picture
    assert "fabric: did not finish in 60 s" in picture
    assert "Monarch does not take part: no wheel for this machine" in picture
    assert "./inv bench --peers" in picture


def test_a_job_at_which_skyfab_failed_is_noted() -> None:
    failed = contest({("command", "ssh"): [0.1]}, {("command", OURS): "exit code 3: node1: no answer"})
    able = [each for each in CONTESTANTS if each.name in (OURS, "ssh")]
    document = report.document(failed, able, [], FACTS, ["command"])
    assert document["notes"] == ["command: skyfab: exit code 3: node1: no answer"]
    assert document["results"] == []


def test_what_takes_long_is_not_repeated() -> None:
    """Neither is anything after a job's time is over; but everything is measured once."""
    job, (first, second, third) = PROGRAMS[0], CONTESTANTS[:3]
    measured = contest({(job.name, first.name): [0.1], (job.name, second.name): [0.1, 16.0]}, {})
    measured.deadline = time.monotonic() + 600
    assert [measured._again(job, each) for each in (first, second, third)] == [True, False, True]
    measured.deadline = time.monotonic() - 1
    assert [measured._again(job, each) for each in (first, second, third)] == [False, False, True]


# ---- the list


def test_every_contestant_has_its_module_and_known_jobs() -> None:
    jobs = {job.name for job in (*PROGRAMS, *SESSIONS)}
    for each in CONTESTANTS:
        assert {*each.jobs, *each.commands} <= jobs, each.name
        assert not each.module or (ROOT / "benchmarks" / "peers" / f"{each.module}.py").exists()
    assert CONTESTANTS[0].name == OURS


def test_every_package_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in environments.CONSTRAINTS.read_text().splitlines() if "==" in line}
    assert {each.package for each in CONTESTANTS if each.package} <= pinned
    assert "numpy" in pinned


def test_only_takes_the_name_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["--only", "lukewarm"])
    assert ended.value.code == 2
    assert "everywhere" in capsys.readouterr().err


# ---- peers that cannot be installed


class FakeUv:
    """Installs everything but two packages; a third one would bring CUDA along."""

    def __init__(self) -> None:
        self.installed: list[str] = []

    def __call__(self, *words: str, text: str = "", show: bool = False) -> str:
        if words[:2] == ("pip", "compile"):
            if "torchmonarch" in text:
                why = "  × No solution found when resolving dependencies:\n  ╰─▶ Because torchmonarch has no wheels"
                raise SetupError(f"{why}\nuv pip compile failed (1)")
            return "nvidia-cublas==1\n" if "torchrunx" in text else text
        if words[:2] == ("pip", "install"):
            self.installed.append(text.strip())
        return ""


def test_a_peer_that_cannot_be_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uv = FakeUv()
    monkeypatch.setattr(environments, "Uv", lambda program, environ: uv)
    monkeypatch.setattr(environments, "find_uv", lambda: "uv")
    monkeypatch.setattr(environments, "PRIVATE", tmp_path)
    (tmp_path / "peers" / "bin").mkdir(parents=True)
    (tmp_path / "peers" / "bin" / "python").symlink_to(sys.executable)
    wanted = {"fabric": "fabric", "torchmonarch": "torchmonarch", "torchrunx": "torchrunx"}
    made = Environment.make(wanted, folder=tmp_path / "peers")
    assert uv.installed == ["numpy", "fabric"]
    assert made.reasons["torchmonarch"].startswith("Because torchmonarch has no wheels")
    assert "CUDA" in made.reasons["torchrunx"]
    assert not (tmp_path / "peers" / "stamp").exists(), "it is tried again next time"
    monkeypatch.setattr(Environment, "versions", lambda self, names: {"fabric": "3.2"})
    by_name = {each["name"]: each for each in program.known(made)}
    assert by_name["fabric"]["version"] == "3.2"
    assert by_name["Monarch"] == {"name": "Monarch", "version": "", "why": made.reasons["torchmonarch"]}


# ---- peers that hang or fail


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_program_that_hangs_is_cut_with_its_children(tmp_path: Path) -> None:
    """The child ignores the end of its parent, and has its pid in a file."""
    hangs = python(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(Failed, match="did not finish in 3 s"):
        run(hangs, limit=3, cwd=tmp_path, env=os.environ)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="exit code 1: ValueError: no route"):
        run(python("raise ValueError('no route')"), limit=30, cwd=tmp_path, env=os.environ)


SESSION = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    if line == "hang\\n":
        time.sleep(600)
    print('{"seconds": 0.5}' if line == "good\\n" else '{"error": "ValueError: no"}', flush=True)
"""


def test_a_session_answers_until_it_fails(tmp_path: Path) -> None:
    with Session(python(SESSION), limit=30, cwd=tmp_path, env=os.environ) as session:
        assert session.seconds("good", limit=30) == 0.5
        with pytest.raises(Failed, match="ValueError: no"):
            session.seconds("bad", limit=30)
        with pytest.raises(Failed, match="did not finish in 1 s"):
            session.seconds("hang", limit=1)


@pytest.mark.parametrize(
    ("text", "why"),
    [("import time; time.sleep(600)", "did not connect in 1 s"), ("raise OSError('no host')", "it ended: OSError")],
)
def test_a_session_that_is_never_ready_fails(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(Failed, match=why):
        Session(python(text), limit=1 if "sleep" in text else 30, cwd=tmp_path, env=os.environ)


# ---- on the lab


def only(name: str, command: Callable[..., list[str]]) -> Contestant:
    return Contestant(name=name, commands={"command": command})


@pytest.mark.lab
@pytest.mark.slow
def test_contestants_take_turns_on_hosts_and_leave_nothing_there(lent_lab: Lab) -> None:
    """skyfab and ssh for real, with one that leaves a process on a host, and one that says something else."""
    arena = Arena.on(lent_lab, TASTE_OF_OTHERS)
    ours, ssh = CONTESTANTS[0], CONTESTANTS[1]
    leaves = "hostname; nohup sleep 600 >/dev/null 2>&1 </dev/null &"
    able = [
        ours,
        ssh,
        only("leaves", lambda site: ["ssh", "-F", site.config, site.addresses[0], leaves]),
        only("wrong", lambda site: ["echo", "somewhere"]),
    ]
    job = Job(name="command", what="one command on one host")
    with Contest.open(arena, Environment(ROOT), TASTE) as contest:
        contest.programs(able, [job])
        assert contest.sample(job, ours)
        assert contest.sample(job, ssh)
        assert contest.sample(job, able[2])
        assert contest.reasons == {("command", "wrong"): "wrong result: node1; it printed 'somewhere'"}
        assert not [one for one in lent_lab.hosts[0].processes() if "600" in one.cmdline]
        contest.sessions([ours])
        assert {name for name, _ in contest.seconds} == {"command", "calls", "everywhere", "map", "array"}
        assert not contest.sample(SESSIONS[0], ssh)
    document = report.document(contest, able, [], FACTS, ["command"])
    assert report.text(document)[0] == "command: one command on one host"
