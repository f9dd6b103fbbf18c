"""Runs as a worker on the host reads them for `skyfab top`: the same as the shell script prints for `skyfab runs`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import skyfab as sky
from skyfab.detached.folder import parse_parts, read_parts
from skyfab.errors import ProtocolError
from skyfab.host.ask.glance import glance
from skyfab.host.ask.runs import look_at_runs
from skyfab.inspect.top.monitor import Answers
from skyfab.session.bootstrap import open_shell
from skyfab.ssh import transport_for


def write(cache: Path, id_: str, state: str = "running", *, agent: str = "", **logs: str) -> None:
    """A run as an agent records it, with the contents of its logs."""
    run = cache / "runs" / id_
    (run / "logs").mkdir(parents=True)
    about = {"id": id_, "name": "night", "function": "train", "hosts": ["here"], "place": 0, "ranks": [0], "world": 1}
    (run / "about").write_text(json.dumps({**about, "on": "all", "elastic": False}))
    (run / "status").write_text(json.dumps({"state": state, "started": 1.5e9}))
    if agent:
        (run / "agent").write_text(agent)
    for number, (name, text) in enumerate(logs.items()):
        log = run / "logs" / name.replace("_", ".")
        log.write_text(text)
        os.utime(log, (1.5e9 + number, 1.5e9 + number))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    """What the record of a live agent says."""
    folder = tmp_path / "agent folder"
    folder.mkdir()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with subprocess.Popen(["sleep", "60"], cwd=folder) as process:
        yield f"{process.pid} {boot} {folder}\n"
        process.kill()


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="the test needs /proc")
def test_it_reads_what_the_shell_script_reads(tmp_path: Path, agent: str) -> None:
    cache = tmp_path / "cache"
    pid, boot, folder = agent.strip().split(" ", 2)
    write(cache, "a1", agent=agent, **{"0_out": "first\n\nlast\n\n", "0_err": "\n"})
    write(cache, "a2", agent=f"{pid} other-boot {folder}\n", **{"0_out": "0 %\r50 %\n"})
    write(cache, "a3", agent=f"{pid} {boot} /elsewhere\n", **{"0_out": "x" * 5000})
    write(cache, "a4", "done", **{"0_out": "old\n", "1_out": "new \x1b[31mred\n"})
    write(cache, "a5", "failed")
    (cache / "runs" / "unfinished").mkdir()
    (cache / "runs" / "file").touch()
    cache.chmod(0o700)
    host = sky.Host(name="here", transport="local", cache=str(cache))
    with open_shell(host, transport_for(host, sky.Inventory(hosts={}))) as shell:
        wanted = [replace(part, gpus=()) for part in read_parts(shell)]
    found = parse_parts("here", look_at_runs(str(cache)))
    assert sorted(found, key=lambda part: part.about.id) == wanted
    states = {part.about.id: (part.state, part.last) for part in found}
    assert states["a1"] == ("running", "last")
    assert states["a2"] == ("lost", "0 %\r50 %"), "a progress bar is one line"
    assert states["a3"][0] == "lost" and states["a4"] == ("done", "new \x1b[31mred")


def test_of_many_runs_that_have_ended_it_tells_the_latest(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path, f"b{number}", "done")
        os.utime(tmp_path / "runs" / f"b{number}" / "status", (1e9 + number, 1e9 + number))
    found = parse_parts("here", look_at_runs(str(tmp_path), ended=3))
    assert [part.about.id for part in found] == ["b29", "b28", "b27"]
    assert look_at_runs(str(tmp_path / "nothing")) == ""


def test_what_is_the_same_is_not_parsed_again(tmp_path: Path) -> None:
    write(tmp_path, "c1", "done")
    answers = Answers("here")
    survey, parts = answers.parse(glance(str(tmp_path)))
    assert survey.cpus and [part.about.id for part in parts] == ["c1"]
    assert answers.parse(glance(str(tmp_path)))[1] is parts
    write(tmp_path, "c2", "done")
    assert len(answers.parse(glance(str(tmp_path)))[1]) == 2


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '["{}"]', '["{}", ""]', "[" * 100_000])
def test_hosts_may_answer_anything(text: str) -> None:
    with pytest.raises(ProtocolError):
        Answers("here").parse(text)
