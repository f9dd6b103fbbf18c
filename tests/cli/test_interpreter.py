"""`skyfab run` of a command that was installed apart from the project, as by `uv tool install`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import stage.projects

import skyfab
from skyfab.cli import interpreter

pytestmark = pytest.mark.programs

SCRIPT = "import sys\nprint(sys.prefix)\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a virtual environment, and a script in a folder below it."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "app"\nversion = "1"\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    return tmp_path


def install_skyfab(project: Path) -> None:
    (packages,) = (project / ".venv" / "lib").glob("python*/site-packages")
    ours = [Path(skyfab.__file__).parents[1], sysconfig.get_path("purelib")]
    (packages / "skyfab.pth").write_text("".join(f"{path}\n" for path in ours))


def run(project: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return stage.projects.skyfab(project, *words, "sub/script.py", **{"VIRTUAL_ENV": "", **environ})


def test_the_projects_environment_runs_the_script_if_it_has_skyfab(project: Path) -> None:
    install_skyfab(project)
    ran = run(project, "run", "-v", "--ranks=1")
    assert ran.stdout == f"local[0] {project}/.venv\n", ran.stderr
    assert f"running with the project's Python: {project}/.venv/bin/python\n" in ran.stderr


def test_modules_of_the_current_folder_do_not_take_the_place_of_others(tmp_path: Path) -> None:
    for name in ("random", "secrets", "signal", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)\n")
    ours = {**os.environ, "PYTHONPATH": str(Path(skyfab.__file__).parents[1])}
    words = [sys.executable, "-c", interpreter._PROGRAM, "run", "--help"]
    assert subprocess.run(words, cwd=tmp_path, env=ours, stdout=subprocess.DEVNULL).returncode == 0


def test_this_environment_runs_it_if_that_was_chosen(project: Path) -> None:
    install_skyfab(project)
    ran = run(project, "run", "--ranks=1", "--no-project")
    assert ran.stdout == f"local[0] {sys.prefix}\n", ran.stderr


def test_one_without_skyfab_and_with_another_python_is_an_error(project: Path) -> None:
    python = project / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\necho 3 9 0\n")
    python.chmod(0o755)
    ran = run(project, "run", "--ranks=1")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"error: the project has Python 3.9 ({python}) without skyfab, but this command runs Python" in ran.stderr
    assert ran.stderr.endswith("\nhint: uv add skyfab\n")
    python.write_text("#!/bin/sh\nexit 1\n")
    assert run(project, "run", "--ranks=1").returncode == 0, "one that does not start is not used"
