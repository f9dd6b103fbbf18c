"""README and the documents: every command typed, every Python block run, every link there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stage.pages import alike, blocks, commands, program, reasons, run_here, type_all

from skyfab.env.pipconf import uv_environment
from skyfab.lab import Lab

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


def pages_with(language: str) -> list[str]:
    return [page.name for page in PAGES if page.name != "README.md" and run_here(page, language)]


def test_few_blocks_are_left_out() -> None:
    assert sum(len(reasons(page)) for page in PAGES) <= 4


@pytest.fixture(scope="module")
def environ(lent_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a shell that has skyfab, and the hosts of the pages: node1 and node2, which are also called gpu."""
    folder = tmp_path_factory.mktemp("pages")
    inventory = folder / "inventory.toml"
    inventory.write_text(lent_lab.inventory.read_text() + 'gpu = ["node1", "node2"]\nrented = ["node1"]\n')
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": str(folder), "SKYFAB_INVENTORY": str(inventory), "PYTHONWARNINGS": "ignore"}


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", pages_with("python"))
def test_the_python_of_a_page_runs(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    """In order, as one program."""
    pytest.importorskip("torch")
    page = ROOT / "docs" / name
    (tmp_path / "page.py").write_text(program(page, ROOT / "tests" / "pages" / f"{page.stem}.py"))
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "calls.md":
        assert done.stdout == "9 [9, 9] 9 (1, 4) 328350\n"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.parametrize("name", pages_with("console"))
def test_the_commands_of_a_page_print_what_it_shows(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    """In order, in a bare shell; numbers may differ. What the reader has already, a script makes."""
    if name == "lab.md" and os.geteuid() != 0:
        pytest.skip("the page's hosts need root")
    page = ROOT / "docs" / name
    script = ROOT / "tests" / "pages" / f"{page.stem}.sh"
    if script.exists():
        subprocess.run(["sh", str(script)], cwd=tmp_path, check=True)
    typed = commands(page)
    for one, printed in zip(typed, type_all(typed, tmp_path, environ, 110), strict=True):
        assert alike(printed, one.shown), f"{one.command} printed {printed}"


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
        assert alike(printed, one.shown), f"{one.command} printed {printed}"
