"""How uv is run, what its errors mean, and where its indexes and their credentials come from; without an index."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from skyfab._util.cache import cache_folder
from skyfab.env import uv
from skyfab.env.facts import Target
from skyfab.env.uv import UvFailed
from skyfab.errors import UsageError

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize(
    ("said", "offline", "hint"),
    [
        ("No space left on device", False, "uv's cache on this machine is full"),
        ("status code 401", False, "put user and password"),
        ("Failed to fetch https://x.example/whl/cpu/torch/", False, "use one index for torch"),
        ("Failed to fetch: Connection refused", True, "is the index up"),
        ("failed to lookup address information", True, "change the versions"),
        ("app was not found in the registry", False, "is the name spelled correctly"),
        ("app has no wheels with a matching tag", False, "choose a version that has a wheel"),
        ("app 1 and app 2 conflict", False, "change the versions that you request"),
    ],
)
def test_a_failure_says_what_to_try_next(said: str, offline: bool, hint: str) -> None:
    failed = UvFailed(said)
    assert (failed.is_offline, failed.hint.startswith(hint)) == (offline, True), failed.hint


def program(folder: Path, script: str) -> str:
    path = folder / "prog"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_is_run_with_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/mine")
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("REMOVED", "1")
    prog = program(tmp_path, 'echo "$PWD" "$VIRTUAL_ENV" "$KEPT" "$ADDED" "${REMOVED-none}" "$NO_COLOR" "$1"')
    (tmp_path / "folder").mkdir()
    found = uv.run(prog, "word", env={"ADDED": "2", "REMOVED": ""}, cwd=tmp_path / "folder")
    assert found == f"{tmp_path}/folder  1 2 none 1 word\n"


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    for script, said in (
        ("echo ignored; echo error: bad >&2; exit 2", "bad"),
        ("echo only here; exit 2", "only here"),
        ("exit 3", "prog word exited with 3"),
    ):
        with pytest.raises(UvFailed) as raised:
            uv.run(program(tmp_path, script), "word")
        assert str(raised.value) == said
    with pytest.raises(UvFailed, match="cannot start missing: No such file"):
        uv.run("/missing", "word")


def test_hints_of_uv_are_kept_only_if_they_say_what_is_there() -> None:
    said = "error: No solution\n\nhint: Wheels are available for `app` on x\n  and y\nhint: try\n  this\nlast"
    assert uv.reason(said).splitlines() == [
        "No solution",
        "Wheels are available for `app` on x",
        "and y",
        "last",
    ]
    assert uv.reason("hint: no\n\n  more of it\nerror: yes") == "yes"
    assert uv.reason("  × first\n  second") == "first\nsecond"


# ---- indexes and credentials


def test_all_places_that_are_configured_the_default_index_last() -> None:
    environ = {
        "UV_INDEX": "lab=https://a.example https://b.example",
        "UV_EXTRA_INDEX_URL": "https://c.example",
        "UV_FIND_LINKS": "https://d.example,,/e",
        "UV_INDEX_URL": "https://old.example",
    }
    places = ("https://a.example", "https://b.example", "https://c.example", "https://d.example", "/e")
    assert uv.configured(environ) == (*places, "https://old.example")
    assert uv.configured({**environ, "UV_DEFAULT_INDEX": "main=https://f.example"}) == (*places, "https://f.example")
    assert uv.configured({}) == ()


def test_logins_come_from_addresses_and_variables() -> None:
    environ = {
        "UV_INDEX": "my-lab=https://a.example/x token=https://b.example plain=https://c.example https://u:p@d.example",
        "UV_DEFAULT_INDEX": "main=https://e.example",
        "UV_INDEX_MY_LAB_USERNAME": "me",
        "UV_INDEX_MY_LAB_PASSWORD": "secret",
        "UV_INDEX_TOKEN_USERNAME": "tok",
        "UV_INDEX_MAIN_PASSWORD": "word",
        "UV_INDEX_OTHER_PASSWORD": "unused",
    }
    assert uv.logins(environ) == {
        "https://a.example": ("me", "secret"),
        "https://b.example": ("tok", ""),
        "https://d.example": ("u", "p"),
        "https://e.example": ("", "word"),
    }
    assert set(uv.secrets(environ)) == {"secret", "tok", "p", "word", "unused"}


def test_logins_of_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine a.example login me password secret\n")
    assert uv.netrc_login("https://a.example/x", {"NETRC": str(file)}) == ("me", "secret")
    assert uv.netrc_login("https://b.example/x", {"NETRC": str(file)}) is None
    assert uv.netrc_login("/a/folder", {"NETRC": str(file)}) is None
    file.write_text("rubbish")
    assert uv.netrc_login("https://a.example/x", {"NETRC": str(file)}) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine c.example login you password word\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert uv.netrc_login("https://c.example/x", {}) == ("you", "word")


def test_files_that_variables_name_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UV_CONSTRAINT", "a.txt  https://x.example/b.txt")
    monkeypatch.setenv("UV_FIND_LINKS", "wheels,/other")
    found = uv.environment()
    assert found["UV_CONSTRAINT"] == f"{tmp_path}/a.txt https://x.example/b.txt"
    assert found["UV_FIND_LINKS"] == f"{tmp_path}/wheels,/other"


# ---- platforms


@pytest.mark.parametrize(
    ("system", "arch", "libc", "name"),
    [
        ("Linux", "x86_64", "glibc 2.36", "x86_64-manylinux_2_36"),
        ("Linux", "arm64", "glibc 2.17", "aarch64-manylinux_2_17"),
        ("Linux", "x86_64", "musl 1.2.4", "x86_64-unknown-linux-musl"),
        ("Darwin", "arm64", "", "aarch64-apple-darwin"),
        ("Linux", "x86_64", "glibc 2.16", "Linux x86_64 (glibc 2.16)"),
        ("Linux", "x86_64", "musl 1.1", "Linux x86_64 (musl 1.1)"),
        ("Linux", "riscv64", "glibc 2.36", "Linux riscv64 (glibc 2.36)"),
        ("FreeBSD", "x86_64", "glibc 2.36", "FreeBSD x86_64 (glibc 2.36)"),
        ("", "", "", "an unknown system"),
    ],
)
def test_platforms_of_uv(system: str, arch: str, libc: str, name: str) -> None:
    target = Target(system=system, arch=arch, libc=libc, python="3.11")
    if "-" in name:
        assert uv.platform_of(target) == name
    else:
        with pytest.raises(UsageError) as raised:
            uv.platform_of(target)
        assert raised.value.message == f"no packages are available for {name}"


# ---- what is made in the cache


def test_a_folder_is_made_once_and_whole() -> None:
    calls: list[Path] = []

    def make(work: Path) -> None:
        calls.append(work)
        (work / "rest").touch()
        (work / "out").mkdir()
        (work / "out" / "file").touch()
        if len(calls) == 1:
            raise KeyError

    folder = cache_folder() / "deep" / "made"
    with pytest.raises(KeyError):
        uv.made(folder, make)
    assert list(folder.parent.iterdir()) == []
    for _ in range(2):
        assert uv.made(folder, make) == folder
        assert [path.name for path in folder.parent.iterdir()] == ["made"]
        assert [path.name for path in folder.iterdir()] == ["file"]
    assert len(calls) == 2


@pytest.mark.parametrize(("number", "is_known"), [(errno.EROFS, True), (errno.ENOSPC, True), (errno.EIO, False)])
def test_a_cache_that_cannot_be_written_to(number: int, is_known: bool) -> None:
    for filename, named in (("/some/file", "/some/file"), (None, str(cache_folder()))):
        error: Any = OSError(number, "why", *([filename] if filename else []))
        with pytest.raises(UsageError if is_known else OSError) as raised, uv.making(cache_folder() / "x"):
            raise error
        if is_known:
            assert str(raised.value).startswith(f"cannot write to the cache of this machine: why: {named}")


def test_a_stamp_changes_with_what_belongs_to_the_source(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("a")
    first = uv.stamp(tmp_path)
    for ignored in (".git", "build", "x.egg-info"):
        (tmp_path / ignored).mkdir()
        (tmp_path / ignored / "file").touch()
    (tmp_path / "dangling").symlink_to("missing")
    assert uv.stamp(tmp_path) == first
    os.utime(tmp_path / "pkg" / "a.py", (5, 5))
    second = uv.stamp(tmp_path)
    (tmp_path / "pkg" / "b.py").touch()
    third = uv.stamp(tmp_path)
    (tmp_path / "pkg" / "build").mkdir()
    (tmp_path / "pkg" / "build" / "c.py").touch()
    assert len({first, second, third, uv.stamp(tmp_path)}) == 4
