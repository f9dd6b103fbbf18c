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
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
PROGRAMS = {"coming_from/tmux_rsync.md": ("rsync", "tmux")}
"""What pages type besides skyfab, ssh and what every machine has."""
PRINTED = {
    "calls.md": "9 [9, 9] 9 (1, 4) 328350\n",
    "coming_from/modal.md": "5.0\n[5.0, 10.0]\n13.0\n",
    "coming_from/skyward.md": "node1 2 nodes\n10\nnode1[0] 2 nodes\n10\n",
    "coming_from/tmux_rsync.md": "[[1.0, 0.5, 0.25]]\n",
    "coming_from/torchrun.md": "[6.0, 6.0]\n",
    "sweeps.md": "best (0.00625, {'lr': 0.1, 'width': 16})\n"
    "2 failed: [{'lr': 5.0, 'width': 8}, {'lr': 5.0, 'width': 16}]\n4 arrived\n",
}
"""What the programs of pages print whose comments say so."""


def name_of(page: Path) -> str:
    """`files.md`, `coming_from/ray.md`: its place below docs."""
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


def test_readme_begins_with_two_commands_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    first = text.index("```sh\n./inv train ")
    assert text.index("pictures/terminal.svg") < first < text.index("\n./inv test ") < text.index("## Install")
    assert len(text[: text.index("## Install")].splitlines()) <= 20, "the first screen"
    assert len(text.splitlines()) <= 164


def test_readme_shows_the_example_as_it_is() -> None:
    code = (ROOT / "examples" / "hello.py").read_text().split('"""\n\n', 1)[1]
    assert code in blocks(ROOT / "README.md", "python")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, page.name, "exec", flags=0x2000)  # top-level await


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def pages_with(language: str) -> list[str]:
    return [name_of(page) for page in PAGES if page.is_relative_to(DOCS) and run_here(page, language)]


def test_few_blocks_are_left_out() -> None:
    """Six of our own, and three programs for other tools: two need an account, one a package of 80 MB."""
    assert sum(len(reasons(page)) for page in PAGES) <= 9


@pytest.fixture(scope="module")
def environ(lent_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a shell that has skyfab, and the hosts of the pages: node1 and node2, which are also called gpu."""
    folder = tmp_path_factory.mktemp("pages")
    inventory = folder / "inventory.toml"
    inventory.write_text(lent_lab.inventory.read_text() + 'gpu = ["node1", "node2"]\nrented = ["node1"]\n')
    tools = connect_as_a_person_would(lent_lab, folder)
    path = f"{tools}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": str(folder), "SKYFAB_INVENTORY": str(inventory), "PYTHONWARNINGS": "ignore"}


def connect_as_a_person_would(lab: Lab, home: Path) -> Path:
    """An ssh_config with the hosts, for what pages type without skyfab; returns a folder with an ssh that reads it.

    The ssh program goes by passwd and not by $HOME. Hosts have torchrun, as where torch is installed for everyone.
    """
    (home / ".ssh").mkdir(mode=0o700)
    known, config = home / ".ssh" / "known_hosts", home / ".ssh" / "config"
    for host in lab.hosts:
        with known.open("a") as file:
            file.write(f"[{host.address}]:{host.port} {host.host_key}\n{host.address} {host.host_key}\n")
        with config.open("a") as file:
            file.write(f"Host {host.name}\n  HostName {host.address}\n  Port {host.port}\n  User {host.user}\n")
            file.write(f"  IdentityFile {host.identity}\n  UserKnownHostsFile {known}\n")
        if host.kind == "namespace":
            write_program(host.path("/usr/local/bin/torchrun"), f'{sys.executable} -m torch.distributed.run "$@"')
    for tool in ("ssh", "scp"):
        write_program(home / "bin" / tool, f'/usr/bin/{tool} -F {config} "$@"')
    return home / "bin"


def write_program(path: Path, command: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexec {command}\n")
    path.chmod(0o755)


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", pages_with("python"))
def test_the_python_of_a_page_runs(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    """In order, as one program."""
    pytest.importorskip("torch")
    parts = (ROOT / "tests" / "pages" / name).with_suffix(".py")
    (tmp_path / "page.py").write_text(program(DOCS / name, parts))
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == PRINTED.get(name, done.stdout)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", pages_with("console"))
def test_the_commands_of_a_page_print_what_it_shows(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    """In order, in a bare shell; numbers may differ. What the reader has already, a script makes."""
    if name in ("lab.md", "coming_from/torchrun.md") and os.geteuid() != 0:
        pytest.skip("the page's hosts need root")
    for needed in PROGRAMS.get(name, ()):
        if shutil.which(needed) is None:
            pytest.skip(f"not installed: {needed}")
    script = (ROOT / "tests" / "pages" / name).with_suffix(".sh")
    if script.exists():
        subprocess.run(["sh", str(script)], cwd=tmp_path, check=True)
    typed = commands(DOCS / name)
    for one, printed in zip(typed, type_all(typed, tmp_path, environ, 280), strict=True):
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
