"""README and the documents: every command typed, every Python block compiled, every link there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stage.pages import blocks, commands, masked, type_all

from skyfab.env.pipconf import uv_environment

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_readme_begins_with_how_to_install_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("## Install") < text.index("```")
    assert len(text.splitlines()) <= 160


def test_readme_shows_the_example_as_it_is() -> None:
    code = (ROOT / "examples" / "hello.py").read_text().split('"""\n\n', 1)[1]
    assert code in blocks(ROOT / "README.md", "python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec", flags=0x2000)  # top-level await


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_programs_of_calls_md_run(tmp_path: Path) -> None:
    whole = [block for block in blocks(ROOT / "docs" / "calls.md", "python") if "__main__" in block]
    (program,) = whole
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("9 [9, 9] 9 (1, 4) 328350\n", "")


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the page's hosts need root")
def test_readme_can_be_typed_as_it_is(tmp_path: Path) -> None:
    """From the line that installs on, in a bare shell and a copy of the checkout; numbers may differ."""
    folder = tmp_path / "skyfab"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "uv").symlink_to(str(shutil.which("uv", path=str(Path(sys.executable).parent))))
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"  # so that hosts have the same version
    (tools / "python3").symlink_to(base)
    environ = {
        "PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(tmp_path),
        **{name: value for name, value in os.environ.items() if name.startswith(("SSL_", "UV_"))},
        **uv_environment(os.environ),
    }
    typed = commands(ROOT / "README.md")
    assert typed[0].command.startswith("uv venv")
    for one, printed in zip(typed, type_all(typed, folder, environ, 110), strict=True):
        assert masked(printed) == masked(one.shown), one.command
