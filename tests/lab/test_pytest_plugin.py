"""The plugin for pytest, in projects that have nothing but it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stage.pages import blocks

PAGE = Path(__file__).parents[2] / "docs" / "lab.md"
FILE = """
import skyfab as sky

@sky.function
def name():
    import socket
    return socket.gethostname()

def test_a_host_is_cut_off_and_killed(skyfab_lab, skyfab_lab_hosts):
    with sky.Compute(inventory=skyfab_lab.inventory, lease=2, ui="none") as compute:
        assert sorted(name() @ compute) == [f"node{number + 1}" for number in range(len(skyfab_lab_hosts))]
    skyfab_lab_hosts[0].cut()
    skyfab_lab_hosts[0].block(skyfab_lab_hosts[-1])
    skyfab_lab_hosts[-1].kill()

def test_the_next_test_has_them_whole(skyfab_lab, skyfab_lab_hosts):
    with sky.Compute(inventory=skyfab_lab.inventory, ui="none") as compute:
        assert len(name() @ compute) == len(skyfab_lab_hosts)
    connect = "import socket; socket.create_connection(('node2', 22), 10)"
    assert not skyfab_lab_hosts[0].run(["python3", "-c", connect], check=False).returncode
"""


def run(folder: Path, *options: str, **environ: str) -> str:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *options]
    done = subprocess.run(words, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True)
    return f"{done.stdout}{done.stderr}"


@pytest.mark.lab
@pytest.mark.slow
def test_a_test_has_hosts_and_leaves_them_whole(tmp_path: Path, namespaces: object) -> None:
    (tmp_path / "test_own.py").write_text(FILE)
    (tmp_path / "test_page.py").write_text(blocks(PAGE, "python")[-1])
    assert "4 passed" in (said := run(tmp_path)), said


@pytest.mark.lab
@pytest.mark.slow
def test_the_number_of_hosts_is_a_setting_or_an_option(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nskyfab_lab_count = 1\n")
    (tmp_path / "test_own.py").write_text("def test_it(skyfab_lab):\n    print(len(skyfab_lab.hosts), 'hosts')\n")
    assert "1 hosts" in (said := run(tmp_path, "-s")), said
    assert "3 hosts" in (said := run(tmp_path, "-s", "--skyfab-lab-count=3")), said


def test_without_a_lab_tests_are_skipped_and_say_why(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_it(skyfab_lab_hosts):\n    pass\n")
    said = run(tmp_path, PATH=str(tmp_path))
    assert "1 skipped" in said and "no lab can be started: " in said
