"""`./inv bench --peers`: its tables, its chart, and what happens with peers that cannot be installed or that hang."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers import report
from benchmarks.peers.contest import Contest
from benchmarks.peers.contestants import CONTESTANTS, OURS
from benchmarks.peers.jobs import PROGRAMS, SESSIONS, TASTE
from benchmarks.peers.program import Failed, Session, run

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


# ---- the list


def test_every_contestant_has_its_module_and_known_jobs() -> None:
    jobs = {job.name for job in (*PROGRAMS, *SESSIONS)}
    for each in CONTESTANTS:
        assert {*each.jobs, *each.commands} <= jobs, each.name
        assert not each.module or (ROOT / "benchmarks" / "peers" / f"{each.module}.py").exists()
    assert CONTESTANTS[0].name == OURS


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


# ---- on the lab
