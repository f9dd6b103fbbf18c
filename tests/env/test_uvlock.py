"""What a uv.lock fixes, from the export that uv makes of it; tests/env/test_sources.py has uv itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyfab.calls.image import PipIndex
from skyfab.env import uv
from skyfab.env.facts import Target
from skyfab.env.resolve import LockError
from skyfab.env.uvlock import read_pins

HOST = Target(system="Linux", arch="x86_64", libc="glibc 2.36", python="3.11")
MIRROR, OWN, TORCH = "https://mirror.example/simple", "https://own.example/simple", "https://torch.example/cpu"
EXPORT = f"""
[[packages]]
name = "app"
version = "1.0"
index = "{MIRROR}/"
wheels = [{{ url = "https://mirror.example/f/app-1.0-py3-none-any.whl", hashes = {{ sha256 = "a1" }} }}]
sdist = {{ name = "app-1.0.tar.gz", url = "https://mirror.example/f/1", hashes = {{ sha256 = "a2" }} }}
[[packages]]
name = "own"
version = "2.0+local"
index = "{OWN}"
wheels = [{{ path = "files/own%2B-2.0.whl", hashes = {{ sha256 = "b1" }} }}, {{ url = "https://x/no-hash.whl" }}]
[[packages]]
name = "torch"
version = "2.5.0+cpu"
index = "{TORCH}"
[[packages]]
name = "plain"
version = "4.0+cpu"
index = "{TORCH}"
[[packages]]
name = "mac"
version = "1.0"
marker = "sys_platform == 'darwin'"
[[packages]]
name = "stone"
vcs = {{ type = "git", url = "https://git.example/stone", commit-id = "c0ffee", subdirectory = "py" }}
[[packages]]
name = "brick"
directory = {{ path = "libs/brick" }}
[[packages]]
name = "tile"
archive = {{ url = "https://x.example/tile.zip", subdirectory = "src", hashes = {{ sha256 = "d1" }} }}
"""


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What uv was asked."""
    asked: list[tuple[Any, ...]] = []

    def run_uv(*arguments: str, **options: Any) -> str:
        asked.append(arguments)
        return EXPORT

    monkeypatch.setattr(uv, "run_uv", run_uv)
    return asked


def lock_in(folder: Path, *, project: str = "", lock: str = "") -> str:
    (folder / "pyproject.toml").write_text(project)
    (folder / "uv.lock").write_text(f"# {folder}\n{lock}")
    return str(folder / "uv.lock")


def test_versions_sources_and_hashes(exported: list[Any], tmp_path: Path) -> None:
    pins = read_pins(lock_in(tmp_path, project=f'url = "{OWN}"\n'), HOST)
    assert pins.constraints == (
        "app==1.0",
        "own==2.0+local",
        "torch==2.5.0",
        "plain==4.0+cpu",
        "stone @ git+https://git.example/stone@c0ffee#subdirectory=py",
        f"brick @ {(tmp_path / 'libs' / 'brick').as_uri()}",
        "tile @ https://x.example/tile.zip#subdirectory=src",
    )
    assert pins.indexes == (PipIndex(OWN, ("own",)),), "others are those of the machine where the lock was made"
    assert dict(pins.hashes) == {
        "app-1.0-py3-none-any.whl": "a1",
        "app-1.0.tar.gz": "a2",
        "own+-2.0.whl": "b1",
        "tile.zip": "d1",
    }


def test_an_index_that_the_lock_names_for_a_package_is_kept(exported: list[Any], tmp_path: Path) -> None:
    pins = read_pins(lock_in(tmp_path, lock=f'    {{ name = "torch", index = "{TORCH}" }},\n'), HOST)
    assert pins.indexes == (PipIndex(TORCH, ("torch",)),)
    assert "torch==2.5.0+cpu" in pins.constraints and "plain==4.0+cpu" in pins.constraints


def test_a_lock_that_cannot_be_read(exported: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LockError, match=r"cannot read the lock .*: No such file or directory"):
        read_pins(str(tmp_path / "uv.lock"), HOST)
    (tmp_path / "uv.lock").write_bytes(b"\xff")
    with pytest.raises(LockError, match=r"cannot read the lock .*: 'utf-8' codec"):
        read_pins(str(tmp_path / "uv.lock"), HOST)

    def fail(*_: object, **__: object) -> str:
        raise uv.UvFailed("no")

    monkeypatch.setattr(uv, "run_uv", fail)
    with pytest.raises(LockError, match=r"uv\.lock: no") as raised:
        read_pins(lock_in(tmp_path, lock="broken"), HOST)
    assert raised.value.hint == "run uv lock to recreate it"
