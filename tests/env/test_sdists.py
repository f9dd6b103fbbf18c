"""Sources of packages: which one a lock names, and for which hosts a wheel that is built here can be used."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from skyfab._util.cache import cache_folder
from skyfab.env import uv
from skyfab.env.facts import Target
from skyfab.env.resolve import LockError
from skyfab.env.sdists import Source, is_built
from skyfab.protocol.blobs import name_of

pytestmark = pytest.mark.usefixtures("world")

BASE = Path("/project")
SUM: dict[str, Any] = {"hashes": {"sha256": "5" * 64}}


@pytest.mark.parametrize(
    ("package", "found"),
    [
        ({"sdist": {"url": "https://x/a.tar.gz", **SUM}}, ("https://x/a.tar.gz", "5" * 64, "", "")),
        ({"archive": {"url": "https://x/a.zip", "subdirectory": "py", **SUM}}, ("https://x/a.zip", "5" * 64, "", "py")),
        ({"archive": {"path": "a.zip", **SUM}}, ("file:///project/a.zip", "5" * 64, "", "")),
        ({"vcs": {"url": "https://g/a", "commit-id": "c0ffee"}}, ("https://g/a", "", "c0ffee", "")),
        ({"directory": {"path": "libs/a"}}, ("file:///project/libs/a", "", "", "")),
        ({"vcs": {"url": "https://g/a"}}, None),
        ({"archive": {"url": "https://x/a-1-py3-none-any.whl", **SUM}}, None),
        ({"wheels": [{"url": "https://x/a.whl"}], "sdist": {"url": "https://x/a.tar.gz", **SUM}}, None),
        ({}, None),
    ],
)
def test_the_source_of_a_package(package: dict[str, Any], found: tuple[str, ...] | None) -> None:
    source = Source.of({"name": "a", **package}, BASE)
    assert (source and (source.url, source.sha256, source.commit, source.inner)) == found


def test_an_archive_must_have_a_hash() -> None:
    for kind in ("sdist", "archive"):
        with pytest.raises(LockError, match="a: its source has no sha256 in the lock"):
            Source.of({"name": "a", kind: {"url": "https://x/a.tar.gz"}}, BASE)


def test_a_wheel_is_built_again_when_its_source_is_another(tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    options: list[dict[str, str]] = [{"sha256": "1"}, {"sha256": "2"}, {"commit": "1a"}, {"sha256": "1", "inner": "x"}]
    keys = [Source("a", "https://x/a", **one).key for one in options]
    folder = Source("a", tmp_path.as_uri())
    keys += [Source("a", "https://y/a", sha256="1").key, folder.key]
    (tmp_path / "more.py").touch()
    assert len({*keys, folder.key}) == len(keys) + 1
    assert Source("a", "https://me:pw@x/a", sha256="1").key == keys[0], "whoever may read it"


def test_a_folder_an_archive_and_a_commit_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    commands: list[tuple[str, ...]] = []

    def build(*arguments: str, **_: object) -> str:
        out = Path(arguments[arguments.index("--out-dir") + 1])
        out.mkdir()
        (out / "a-1.0-py3-none-any.whl").touch()
        places.append(arguments[-1])
        return ""

    def git(*command: str, **_: object) -> str:
        commands.append(command)
        return ""

    monkeypatch.setattr(uv, "run_uv", build)
    monkeypatch.setattr(uv, "run", git)
    archive = tmp_path / "a.tar.gz"
    archive.write_text("archive")
    sha256 = name_of(b"archive")
    for source in (
        Source("a", tmp_path.as_uri(), inner="py"),
        Source("a", archive.as_uri(), sha256=sha256),
        Source("a", "https://g/a", commit="c0ffee", inner="py"),
    ):
        assert source.wheel(Target(system="Linux", arch="x86_64", libc="", python="3.11")).version == "1.0"
    assert places[:2] == [f"{tmp_path}/py", str(cache_folder() / "wheels" / sha256 / "a.tar.gz")]
    assert places[2].endswith("/clone/py")
    assert [command[1] for command in commands] == ["clone", "checkout", "submodule"]
    assert "https://g/a" in commands[0] and commands[1][-1] == "c0ffee"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine has glibc 2.31; uv has built what lies in this folder."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda *_: ("glibc", "2.31"))
    folder = cache_folder() / "built" / "key"
    folder.mkdir(parents=True)
    monkeypatch.setattr(uv, "made", lambda place, make: folder)
    return folder


def test_a_wheel_without_compiled_code_is_for_all_hosts(built: Path) -> None:
    (built / "a-1.5-py3-none-any.whl").write_text("wheel")
    wheel = Source("a", "https://x/a", sha256="1").wheel(Target(system="Darwin", arch="arm64", libc="", python="3.11"))
    assert (wheel.package, wheel.version, wheel.filename) == ("a", "1.5", "a-1.5-py3-none-any.whl")
    assert is_built(wheel)


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({}, True),
        ({"libc": "glibc 2.36"}, True),
        ({"libc": "glibc 2.30"}, False),
        ({"libc": "musl 2.40"}, False),
        ({"arch": "aarch64"}, False),
        ({"system": "Darwin", "libc": ""}, False),
    ],
)
def test_compiled_code_is_for_hosts_like_this_machine(built: Path, change: dict[str, str], runs: bool) -> None:
    (built / "a-1.5-cp311-cp311-linux_x86_64.whl").write_text("wheel")
    fields = {"system": "Linux", "arch": "x86_64", "libc": "glibc 2.31", "python": "3.11", **change}
    source = Source("a", "https://x/a", sha256="1")
    if runs:
        assert source.wheel(Target(**fields)).version == "1.5"
    else:
        with pytest.raises(LockError, match="a has no wheel, and one built on this machine does not run on"):
            source.wheel(Target(**fields))
