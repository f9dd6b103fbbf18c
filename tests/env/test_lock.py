"""Locks: what an image means on each kind of host, where each package comes from, and how often uv is asked."""

from __future__ import annotations

import errno
import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from platform import libc_ver

import pytest
from stage.index import Index, isolate_uv, make_wheel, sha256
from stage.threads import at_once

from skyfab._util import atomic
from skyfab._util.cache import cache_folder
from skyfab.calls.image import Image, PipIndex
from skyfab.env import tools, uv
from skyfab.env.facts import Target
from skyfab.env.lock import Lock, known_lock, make_lock, read_lock
from skyfab.env.resolve import LockError, clean
from skyfab.env.wheels import fetch
from skyfab.errors import UsageError

HOST = Target(system="Linux", arch="x86_64", libc="glibc 2.36", python="3.11")
PASSWORD = "s3cr%t/wörd"
TAG = "-py3-none-any.whl"


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv sees nothing of this machine's settings and caches, and nothing beyond loopback."""
    isolate_uv(tmp_path, monkeypatch)
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "20")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The default index."""
    with Index(tmp_path / "index") as found:
        monkeypatch.setenv("UV_DEFAULT_INDEX", found.url)
        yield found


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Index]:
    """An index with a password."""
    with Index(tmp_path / "private", user="me", password=PASSWORD) as found:
        yield found


def chosen(lock: Lock) -> dict[str, str]:
    return {wheel.package: wheel.version for wheel in lock.wheels}


def lock_of(*pip: str, target: Target = HOST, scoped: tuple[PipIndex, ...] = (), **options: object) -> Lock:
    return make_lock(Image(pip=pip, pip_indexes=scoped), target, **options)  # type: ignore[call-overload,no-any-return]


class Counted:
    """uv with a note of each call."""

    def __init__(self, folder: Path) -> None:
        self.notes, self.program = folder / "calls", folder / "counted-uv"
        self.program.write_text(f'#!/bin/sh\necho "$*" >>{self.notes}\nexec {uv.program()} "$@"\n')
        self.program.chmod(0o755)

    @property
    def resolutions(self) -> int:
        calls = self.notes.read_text().splitlines() if self.notes.exists() else []
        return sum("pip compile" in call and "--offline" not in call for call in calls)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted(tmp_path)
    monkeypatch.setattr(uv, "program", lambda: str(found.program))
    return found


# ---- what a lock is


def test_a_lock_has_every_package_with_its_wheel_and_hash(index: Index) -> None:
    app = index.add("app", "1.0", requires=["Some-Lib>=1"])
    lib = index.add("some-lib", "1.5")
    lock = lock_of("app")
    assert chosen(lock) == {"app": "1.0", "some-lib": "1.5"}
    assert [wheel.sha256 for wheel in lock.wheels] == [sha256(app), sha256(lib)]
    assert [wheel.filename for wheel in lock.wheels] == [app.name, lib.name]
    assert all(wheel.url.startswith(index.root) for wheel in lock.wheels)


def test_wheels_without_a_hash_in_the_index_get_one(index: Index) -> None:
    index.hashes = False
    wheel = index.add("app", "1.0")
    assert lock_of("app").wheels[0].sha256 == sha256(wheel)


def test_a_file_has_a_hash_of_its_requirement_or_is_refused(index: Index) -> None:
    app = index.add("app", "1.0", requires=["some-lib"])
    index.add("some-lib", "1.5")
    right, wrong = f"--hash=sha256:{sha256(app)}", f"--hash=sha256:{'0' * 64}"
    assert chosen(lock_of(f"app==1.0 {wrong} {right}")) == {"app": "1.0", "some-lib": "1.5"}
    with pytest.raises(LockError, match=rf"(?s){app.name} matches none of the .*{sha256(app)}\nallowed sha256:000"):
        lock_of(f"app==1.0 {wrong}")


def test_a_cache_here_that_cannot_be_written_to_is_named(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add("app", "1.0")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic, "write", full)
    with pytest.raises(UsageError, match=r"(?s)cache of this machine.*No space left.*/cache.*XDG_CACHE_HOME"):
        lock_of("app")


def test_an_image_without_packages_needs_no_uv(counted: Counted) -> None:
    lock = make_lock(Image(), HOST)
    assert lock.wheels == ()
    assert not counted.notes.exists()


def test_the_digest_is_of_the_files_and_not_of_where_they_are(tmp_path: Path, index: Index) -> None:
    index.add("app", "1.0")
    make_wheel(tmp_path / "flat", "app", "1.0")
    here, there = lock_of("app"), lock_of("app", scoped=(PipIndex(str(tmp_path / "flat"), ("app",)),))
    assert here.wheels[0].url != there.wheels[0].url
    assert here.digest == there.digest
    assert len({here.digest, lock_of("app", target=replace(HOST, python="3.12")).digest}) == 2
    assert len({here.digest, lock_of("app", target=replace(HOST, arch="aarch64")).digest}) == 2


# ---- platforms

TAGS = {
    "2.17": "cp311-cp311-manylinux_2_17_{arch}.manylinux2014_{arch}",
    "2.28": "cp311-cp311-manylinux_2_28_{arch}",
    "2.35": "cp311-cp311-manylinux_2_35_{arch}",
    "musl": "cp311-cp311-musllinux_1_2_{arch}",
}


@pytest.fixture
def native(index: Index) -> Index:
    """A package with a wheel for each platform, and a newer version for the newest only."""
    for arch in ("x86_64", "aarch64"):
        for tag in TAGS.values():
            index.add("native", "1.0", tag=tag.format(arch=arch))
        index.add("native", "2.0", tag=f"cp311-cp311-manylinux_2_35_{arch}")
    index.add("native", "1.0", tag="cp311-cp311-macosx_11_0_arm64")
    index.add("native", "1.0", tag="cp312-cp312-manylinux_2_17_x86_64")
    return index


def test_each_platform_gets_its_newest_version_and_best_wheel(native: Index) -> None:
    for arch, libc, version, tag in (
        ("aarch64", "glibc 2.17", "1.0", TAGS["2.17"]),
        ("x86_64", "glibc 2.30", "1.0", TAGS["2.28"]),
        ("x86_64", "glibc 2.36", "2.0", TAGS["2.35"]),
        ("aarch64", "musl 1.2.4", "1.0", TAGS["musl"]),
    ):
        (wheel,) = lock_of("native", target=replace(HOST, arch=arch, libc=libc)).wheels
        assert (wheel.version, wheel.filename) == (version, f"native-{version}-{tag.format(arch=arch)}.whl")


def test_macos_and_other_pythons_get_theirs(native: Index) -> None:
    mac = Target(system="Darwin", arch="arm64", libc="", python="3.11")
    assert lock_of("native", target=mac).wheels[0].filename.endswith("macosx_11_0_arm64.whl")
    assert "cp312" in lock_of("native", target=replace(HOST, python="3.12")).wheels[0].filename


def test_no_wheel_for_the_platform_is_said_with_the_platform(native: Index) -> None:
    with pytest.raises(
        LockError, match=r"(?s)native==2\.0 found for Python 3\.11 on Linux x86_64 \(glibc 2\.28\).*no wheels"
    ):
        lock_of("native==2.0", target=replace(HOST, libc="glibc 2.28"))
    with pytest.raises(LockError, match=r"(?s)macOS|Darwin x86_64"):
        lock_of("native", target=Target(system="Darwin", arch="x86_64", libc="", python="3.11"))


def test_dependencies_go_by_the_targets_markers(index: Index) -> None:
    """And not by those of the machine that resolves."""
    here = ["mac; sys_platform == 'darwin'", "arm; platform_machine == 'aarch64'", "old; python_version < '3.11'"]
    index.add("app", "1.0", requires=here)
    for name in ("mac", "arm", "old"):
        index.add(name, "1.0")
    assert set(chosen(lock_of("app"))) == {"app"}
    assert set(chosen(lock_of("app", target=replace(HOST, arch="aarch64")))) == {"app", "arm"}
    mac = Target(system="Darwin", arch="arm64", libc="", python="3.10")
    assert set(chosen(lock_of("app", target=mac))) == {"app", "mac", "old"}


# ---- where packages come from


def test_a_decoy_of_a_higher_version_loses(index: Index, private: Index) -> None:
    """Asked for by name; and what the private index has beside the named packages is not looked at."""
    index.add("inner", "9.0")
    index.add("app", "1.0")
    private.add("inner", "1.0")
    private.add("app", "99.0")
    lock = lock_of("inner", "app", scoped=(PipIndex(private.secret_url, ("Inner",)),))
    assert chosen(lock) == {"inner": "1.0", "app": "1.0"}


def test_a_decoy_loses_where_only_another_package_requires_it(index: Index, private: Index) -> None:
    """Two steps deep, and of two the one that is not required stays away."""
    index.add("app", "1.0", requires=["inner"])
    for name in ("inner", "deep", "unused"):
        index.add(name, "9.0")
        private.add(name, "1.0", requires=["deep"] if name == "inner" else ())
    scope = PipIndex(private.secret_url, ("inner", "deep", "unused"))
    assert chosen(lock_of("app", scoped=(scope,))) == {"app": "1.0", "inner": "1.0", "deep": "1.0"}


def test_a_decoy_in_find_links_loses(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add("app", "1.0", requires=["inner"])
    make_wheel(tmp_path / "links", "inner", "9.0")
    make_wheel(tmp_path / "flat", "inner", "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    assert chosen(lock_of("app"))["inner"] == "9.0"
    assert chosen(lock_of("app", scoped=(PipIndex(str(tmp_path / "flat"), ("inner",)),)))["inner"] == "1.0"


def test_a_required_package_may_be_on_its_own_index_only(index: Index, private: Index) -> None:
    """The newest app is taken, though the default index lacks what it requires."""
    index.add("app", "2.0", requires=["inner"])
    index.add("app", "1.0")
    private.add("inner", "1.0")
    assert chosen(lock_of("app", scoped=(PipIndex(private.secret_url, ("inner",)),))) == {"app": "2.0", "inner": "1.0"}


def test_a_named_package_that_is_not_needed_may_be_missing(index: Index, private: Index) -> None:
    index.add("app", "1.0", requires=["inner"])
    index.add("inner", "9.0")
    private.add("inner", "1.0")
    scope = PipIndex(private.secret_url, ("inner", "not-there"))
    assert chosen(lock_of("app", scoped=(scope,))) == {"app": "1.0", "inner": "1.0"}


def test_an_index_may_be_a_folder_a_file_url_a_page_or_a_tree(tmp_path: Path, index: Index) -> None:
    index.add("app", "9.0")
    flat = tmp_path / "flat folder"
    wheel = make_wheel(flat, "app", "1.0")
    (flat / "links.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    tree = tmp_path / "simple" / "app"
    make_wheel(tree, "app", "1.0")
    (tree / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    for url in (str(flat), flat.as_uri(), str(tree.parent)):
        lock = lock_of("app", scoped=(PipIndex(url, ("app",)),))
        assert chosen(lock) == {"app": "1.0"}
        assert lock.wheels[0].url.startswith("file://")
    with Index(flat) as served:
        lock = lock_of("app", scoped=(PipIndex(f"{served.root}/files/links.html", ("app",)),))
        assert chosen(lock) == {"app": "1.0"}


def test_a_wheel_may_be_named_by_its_url(index: Index, private: Index) -> None:
    index.add("other", "1.0")
    wheel = private.add("app", "1.0", requires=["other"])
    login = private.secret_url.partition("/simple")[0]
    lock = lock_of(f"app @ {login}/files/{wheel.name}")
    assert chosen(lock) == {"app": "1.0", "other": "1.0"}
    assert PASSWORD not in lock.text and "me:" not in lock.text
    assert fetch(lock.wheels)[sha256(wheel)].name == wheel.name


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (Image(pip=("-r requirements.txt",)), "not a valid requirement"),
        (Image(pip=("app",), pip_indexes=(PipIndex("/not/there", ("app",)),)), "no such folder"),
        (Image(pip=("app",), pip_indexes=(PipIndex("https://a.example/simple"),)), "no packages named"),
        (Image(pip=("app",), pip_indexes=(PipIndex("/", ("App",)), PipIndex("/", ("app",)))), "app has two indexes"),
    ],
)
def test_mistakes_in_an_image_are_named(image: Image, said: str) -> None:
    with pytest.raises(LockError, match=said) as caught:
        make_lock(image, HOST)
    assert caught.value.exit_code == 2


# ---- what is older than the newest


def older(lock: Lock) -> str:
    *_, last = lock.text.splitlines()
    return last.removeprefix("# older than the newest version: ") if last.startswith("#") else ""


def test_a_package_that_another_one_holds_back_is_named(index: Index, private: Index) -> None:
    """Also if an older version of the other one would not, and if only another package requires that one."""
    for version in ("1.0", "2.0"):
        index.add("lib", version)
        index.add("python-x", version, python=">=3.12" if version == "2.0" else "")
    index.add("app", "1.0")
    index.add("app", "2.0", requires=["mid"])
    index.add("mid", "1.0", requires=["lib<2"])
    lock = lock_of("app", "lib", "python-x")
    assert chosen(lock) == {"app": "2.0", "lib": "1.0", "mid": "1.0", "python-x": "1.0"}
    assert older(lock) == (
        "lib 1.0 (all versions of mid depend on lib<2), python-x 1.0 (python-x==2.0 requires Python >=3.12)"
    )
    assert older(lock_of("app")) == "", "only what was requested is named"
    private.add("app", "1.5", requires=["lib<2"])
    scoped = (PipIndex(private.secret_url, ("app",)),)
    assert older(lock_of("app", "lib", scoped=scoped)) == "lib 1.0 (all versions of app depend on lib<2)"


# ---- what goes wrong


def test_a_package_that_does_not_exist(index: Index) -> None:
    with pytest.raises(LockError, match=r"(?s)no version of nonesuch found for .*nonesuch was not found") as caught:
        lock_of("nonesuch")
    assert "hint: is the name spelled correctly" in str(caught.value) and "skyfab-image" not in str(caught.value)
    index.add("app", "1.0")
    index.add("nonesuch-app", "1.0")
    with pytest.raises(LockError, match="no version of nonesuch>1 found for "):
        lock_of("app", "nonesuch>1", "nonesuch-app")


def test_versions_that_cannot_be_together(index: Index) -> None:
    index.add("app", "1.0", requires=["lib<2"])
    for version in ("1.0", "2.0"):
        index.add("lib", version)
    with pytest.raises(LockError, match=r"(?s)lib<2.*lib>=2.*hint: change the versions") as caught:
        lock_of("app", "lib>=2")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value).splitlines()) < 18


def test_an_index_that_is_down_is_asked_once(index: Index, private: Index, counted: Counted) -> None:
    """Each attempt of uv takes 20 s if nothing answers at its address."""
    index.add("app", "1.0", requires=["inner"])
    private.close()
    with pytest.raises(
        LockError, match=r"(?s)^cannot reach an index.*Connection refused.*hint: is the index up"
    ) as down:
        lock_of("app", scoped=(PipIndex(private.secret_url, ("inner",)),))
    assert counted.resolutions == 1
    assert PASSWORD not in str(down.value)


def test_credentials_are_in_no_file_and_no_message(
    tmp_path: Path, index: Index, private: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a PipIndex, of pip's configuration, and when something goes wrong."""
    wheel = private.add("inner", "1.0")
    scope = PipIndex(private.secret_url, ("inner",))
    lock = lock_of("inner", scoped=(scope,))
    assert fetch(lock.wheels)[sha256(wheel)].exists()
    messages = [repr(lock), lock.text]
    with pytest.raises(LockError) as caught:
        lock_of("inner>5", scoped=(scope,))
    messages += [str(caught.value)]
    monkeypatch.setenv("PIP_INDEX_URL", private.secret_url)
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    lock = lock_of("inner")
    messages += [repr(lock), lock.text, *(wheel.url for wheel in lock.wheels)]
    with pytest.raises(LockError) as caught:
        lock_of("inner>5")
    messages += [str(caught.value)]
    secrets = [PASSWORD, private.secret_url.split("//")[1].split("@")[0], "s3cr"]
    for text in messages:
        assert not [secret for secret in secrets if secret in text], text
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        assert not [secret for secret in secrets if secret.encode() in path.read_bytes() or secret in str(path)], path


def test_the_key_of_a_lock_has_no_password(index: Index, private: Index, counted: Counted) -> None:
    """Whose password changes has the same lock."""
    private.add("inner", "1.0")
    lock_of("inner", scoped=(PipIndex(private.secret_url, ("inner",)),))
    lock_of("inner", scoped=(PipIndex(private.url.replace("//", "//me:new@"), ("inner",)),))
    assert counted.resolutions == 1


# ---- made once


def test_a_lock_is_made_once_until_it_is_to_be_upgraded(index: Index, counted: Counted) -> None:
    index.add("app", "1.0")
    assert known_lock(Image(pip=("app",)), HOST) is None
    first = lock_of("app")
    index.add("app", "2.0")
    assert lock_of("app") == first == known_lock(Image(pip=("app",)), HOST)
    assert counted.resolutions == 1
    assert chosen(lock_of("app", upgrade=True)) == {"app": "2.0"} == chosen(lock_of("app"))
    assert counted.resolutions == 2


def test_other_inputs_are_another_lock(index: Index, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add("app", "1.0")
    lock_of("app")
    lock_of("app>=1")
    lock_of("app", target=replace(HOST, python="3.12"))
    lock_of("app", target=replace(HOST, libc="glibc 2.28"))
    lock_of("app", scoped=(PipIndex(index.url, ("app",)),))
    monkeypatch.setenv("UV_PRERELEASE", "allow")
    lock_of("app")
    assert counted.resolutions == 6


def test_another_content_of_a_file_with_limits_is_another_lock(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add("app", "1.0")
    index.add("app", "2.0")
    limits = tmp_path / "limits.txt"
    monkeypatch.setenv("UV_CONSTRAINT", str(limits))
    for version in ("2.0", "1.0"):
        limits.write_text(f"app=={version}\n")
        assert chosen(lock_of("app")) == {"app": version}


def test_the_uv_toml_of_a_machine_is_read(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add("app", "1.0")
    index.add("app", "2.0b1")
    settings = tmp_path / "etc" / "uv" / "uv.toml"
    settings.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_DIRS", f"/nowhere{os.pathsep}{tmp_path / 'etc'}")
    assert chosen(lock_of("app")) == {"app": "1.0"}
    settings.write_text('prerelease = "allow"\n')
    assert chosen(lock_of("app")) == {"app": "2.0b1"}


@pytest.mark.parametrize("damage", ["cut", "\udcff"])
def test_a_damaged_lock_is_made_again(index: Index, counted: Counted, damage: str) -> None:
    index.add("app", "1.0")
    first = lock_of("app")
    (file,) = (cache_folder() / "locks").iterdir()
    file.write_bytes(file.read_bytes()[:-9] if damage == "cut" else damage.encode(errors="surrogateescape"))
    assert lock_of("app") == first
    assert counted.resolutions == 2
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_threads_that_ask_for_the_same_wait_for_one(index: Index, counted: Counted) -> None:
    index.add("app", "1.0")
    uv.version.cache_clear()
    locks = at_once(lambda _: lock_of("app"), range(6))
    assert len({lock.digest for lock in locks}) == 1
    assert counted.resolutions == 1


# ---- torch


def torch_wheel(folder: Path, version: str, *, arch: str = "x86_64", cuda: bool = False) -> None:
    requires = ["nvidia-cudnn-cu13"] if cuda else []
    make_wheel(folder, "torch", version, tag=f"cp311-cp311-manylinux_2_28_{arch}", requires=requires)


@pytest.fixture
def links(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks into, beside an index with a newer torch for GPUs."""
    torch_wheel(index.folder, "2.14.0", cuda=True)
    index.add("nvidia-cudnn-cu13", "9.0")
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize(
    ("driver", "version"),
    [("", "2.13.0+cpu"), ("550.54.15", "2.13.0+cu126"), ("470.82", "2.12.0+cu118")],
)
def test_a_build_that_pip_is_shown_is_taken_where_it_suits(links: Path, driver: str, version: str) -> None:
    for build in ("2.13.0+cpu", "2.13.0+cu126", "2.13.0+cu130", "2.12.0+cu118", "2.12.0+cpu"):
        torch_wheel(links, build)
    assert chosen(lock_of("torch", target=replace(HOST, driver=driver))) == {"torch": version}


def test_also_where_torch_only_comes_along(links: Path, index: Index) -> None:
    torch_wheel(links, "2.13.0+cpu")
    index.add("trainer", "1.0", requires=["torch>=2"])
    assert chosen(lock_of("trainer")) == {"trainer": "1.0", "torch": "2.13.0+cpu"}


def test_beside_torch_a_package_that_does_not_exist_is_named(links: Path, index: Index, counted: Counted) -> None:
    torch_wheel(links, "2.13.0+cpu")
    with pytest.raises(LockError, match=r"(?s)^no version of nosuch found.*is the name spelled correctly"):
        lock_of("torch", "nosuch")
    assert "--torch-backend" not in counted.notes.read_text()


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "/whl/cpu/torch"),
        ({"driver": "550.54.15"}, r"/whl/cu12\d/torch"),
        ({"rocm": "6.4.1"}, r"/whl/rocm6\.4/torch"),
    ],
)
def test_else_uv_chooses_pytorchs_index_for_the_targets_gpu(
    index: Index, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], path: str
) -> None:
    """Which is out of reach in tests: the address that was tried tells. The default index has no torch."""
    monkeypatch.setenv("UV_CUDA_DRIVER_VERSION", "999")  # this machine's
    with pytest.raises(LockError, match=rf"(?s)^cannot reach an index to find torch for .*{path}.*hint: use one index"):
        lock_of("torch", target=replace(HOST, **changes))


@pytest.mark.parametrize(
    ("changes", "works"),
    [
        ({}, True),
        ({"driver": "N/A"}, True),
        ({"driver": "550.54.15"}, False),  # too old for CUDA 13: torch would not find the GPU
    ],
)
def test_without_pytorchs_index_the_default_index_is_used(
    links: Path, index: Index, changes: dict[str, str], works: bool
) -> None:
    """Its torch is built for CUDA, which runs on hosts without a GPU too."""
    torch_wheel(index.folder, "2.15.0", cuda=True)
    target = replace(HOST, **changes)
    if works:
        assert chosen(lock_of("torch", target=target)) == {"torch": "2.15.0", "nvidia-cudnn-cu13": "9.0"}
    else:
        with pytest.raises(LockError, match="cannot reach an index"):
            lock_of("torch", target=target)


def test_an_index_named_for_torch_is_where_torch_comes_from(links: Path, private: Index) -> None:
    torch_wheel(links, "2.13.0+cpu")
    torch_wheel(private.folder, "2.10.0+custom")
    assert chosen(lock_of("torch", scoped=(PipIndex(private.secret_url, ("torch",)),))) == {"torch": "2.10.0+custom"}


def vision(folder: Path, version: str, *, torch: str = "2.13.0") -> None:
    make_wheel(folder, "torchvision", version, tag="cp311-cp311-manylinux_2_28_x86_64", requires=[f"torch=={torch}"])


def test_a_torchvision_of_another_index_than_torch_is_refused(links: Path, index: Index) -> None:
    """As PyPI's would be beside a torch for CPUs: its versions fit, and it fails when it is imported."""
    torch_wheel(links, "2.13.0+cpu")
    vision(index.folder, "0.28.0")
    index.add("models", "1.0", requires=["torchvision"])
    for wanted in (["torch", "torchvision"], ["models"]):
        with pytest.raises(LockError, match=r"/whl/cpu/(?s:.*)hint: use one index for torch and its companions"):
            lock_of(*wanted)


def test_a_torch_that_torchvision_fits_is_taken_even_if_it_is_older(links: Path, index: Index) -> None:
    for build in ("2.13.0+cpu", "2.12.0+cpu"):
        torch_wheel(links, build)
    vision(links, "0.27.0+cpu", torch="2.12.0")
    vision(index.folder, "0.28.0")
    assert chosen(lock_of("torch", "torchvision")) == {"torch": "2.12.0+cpu", "torchvision": "0.27.0+cpu"}


def test_an_index_for_torch_is_the_index_of_torchvision_too(private: Index, index: Index) -> None:
    torch_wheel(private.folder, "2.13.0+cpu")
    vision(index.folder, "0.28.1")
    scope = (PipIndex(private.secret_url, ("torch",)),)
    with pytest.raises(LockError, match="torchvision"):
        lock_of("torch", "torchvision", scoped=scope)
    vision(private.folder, "0.28.0+cpu")
    assert chosen(lock_of("torch", "torchvision", scoped=scope))["torchvision"] == "0.28.0+cpu"


def test_macos_takes_torch_from_the_index(index: Index) -> None:
    make_wheel(index.folder, "torch", "2.14.0", tag="cp311-none-macosx_11_0_arm64")
    mac = Target(system="Darwin", arch="arm64", libc="", python="3.11")
    assert chosen(lock_of("torch", target=mac)) == {"torch": "2.14.0"}


def test_a_pool_has_one_version_of_torch(links: Path) -> None:
    """With the build that suits each; the first says which."""
    plain, gpu = HOST, replace(HOST, arch="aarch64", driver="550.54.15")
    torch_wheel(links, "2.12.0+cpu")
    for build in ("2.13.0+cu126", "2.12.0+cu126"):
        torch_wheel(links, build, arch="aarch64")
    assert chosen(lock_of("torch", target=gpu)) == {"torch": "2.13.0+cu126"}
    assert chosen(lock_of("torch", target=gpu, together=(plain, gpu))) == {"torch": "2.12.0+cu126"}
    assert chosen(lock_of("torch", target=plain, together=(plain, gpu))) == {"torch": "2.12.0+cpu"}
    with pytest.raises(LockError, match=r"(?s)Linux x86_64.*torch 2\.13\.0 as on other hosts"):
        lock_of("torch", target=plain, together=(gpu, plain))


def test_a_pool_without_torch_does_not_look_at_its_other_hosts(index: Index) -> None:
    """Not even if there is nothing for them."""
    index.add("app", "1.0")
    assert chosen(lock_of("app", together=(replace(HOST, system="Plan9"), HOST))) == {"app": "1.0"}


# ---- a lock that somebody else made

MINE = """
lock-version = "1.0"
created-by = "somebody"
[[packages]]
name = "native"
version = "1.0"
wheels = [
    {{ url = "https://a.example/native-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", hashes = {{ sha256 = "{sum}" }} }},
    {{ path = "native-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", size = 7, hashes = {{ sha256 = "{sum}" }} }},
    {{ url = "https://a.example/native-1.0-cp311-cp311-macosx_11_0_arm64.whl", hashes = {{ sha256 = "{sum}" }} }},
]
[[packages]]
name = "winonly"
version = "1.0"
marker = "sys_platform == 'win32'"
sdist = {{ url = "https://a.example/winonly-1.0.tar.gz", hashes = {{ sha256 = "{sum}" }} }}
[[packages]]
name = "extra"
version = "1.0"
marker = "'more' in extras"
sdist = {{ url = "https://a.example/extra-1.0.tar.gz", hashes = {{ sha256 = "{sum}" }} }}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "pylock.toml"
    path.write_text(MINE.format(sum="a" * 64))
    return path


def test_a_lock_of_ones_own_is_used_as_it_is(mine: Path, counted: Counted) -> None:
    (wheel,) = read_lock(mine, HOST).wheels
    assert (wheel.url, wheel.size) == ((mine.parent / wheel.filename).as_uri(), 7)
    assert "2_28" in wheel.filename
    assert "2_17" in read_lock(mine, replace(HOST, libc="glibc 2.17")).wheels[0].filename
    image = Image(lock=str(mine))
    assert make_lock(image, HOST).wheels == (wheel,)
    assert not counted.notes.exists()


def test_a_lock_of_ones_own_may_have_default_groups(mine: Path) -> None:
    text = mine.read_text().replace("sys_platform == 'win32'", "'train' in dependency_groups")
    mine.write_text(text.replace("sdist = ", "archive = ").replace(".tar.gz", TAG))
    assert [wheel.package for wheel in read_lock(mine, HOST).wheels] == ["native"]
    mine.write_text(f'default-groups = ["train"]\n{mine.read_text()}')
    assert [wheel.package for wheel in read_lock(mine, HOST).wheels] == ["native", "winonly"]


def test_a_lock_of_ones_own_without_a_wheel_for_the_host(mine: Path) -> None:
    with pytest.raises(LockError, match=r"/pylock\.toml: native 1\.0 has no wheel for Python 3\.11 on Linux aarch64"):
        read_lock(mine, replace(HOST, arch="aarch64"))


@pytest.mark.parametrize(("quote", "secret"), [('"', "p'w"), ("'", 'p"w'), ("'", "p@w")])
def test_passwords_in_a_lock_of_ones_own_stay_here(tmp_path: Path, quote: str, secret: str) -> None:
    """The host gets the wheels, and neither a password nor a part of one."""
    url = f"{quote}https://ada:{secret}@a.example/x-1.0-py3-none-any.whl{quote}"
    file = tmp_path / "pylock.toml"
    hashes = f"hashes = {{ sha256 = '{'a' * 64}' }}"
    file.write_text(f"[[packages]]\nname = 'x'\nversion = '1.0'\nwheels = [{{ url = {url}, {hashes} }}]\n")
    lock = read_lock(file, HOST)
    assert not uv.is_public(lock.wheels[0].url)
    assert "ada" not in lock.text
    assert secret not in lock.text
    assert f"ada:{secret}@" in lock.wheels[0].url, "it is fetched from here"


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("ssh://git@git.example/x", "ssh://git@git.example/x"),
        ("git+ssh://git:p@w@git.example:22/x@main", "git+ssh://git@git.example:22/x@main"),
        ("https://git@git.example/x@main", "https://git.example/x@main"),
        ("git+https://ada:p@w@git.example/x", "git+https://git.example/x"),
    ],
)
def test_of_logins_only_the_user_of_ssh_is_kept(url: str, kept: str) -> None:
    """git would use the name of this machine's user."""
    assert clean(f'vcs = {{ url = "{url}" }}') == f'vcs = {{ url = "{kept}" }}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("packages = 7", "not a pylock.toml"),
        (
            "[[packages]]\nname = 'x'\nversion = '1'\nwheels = [{url = 'https://a.example/x-1-py3-none-any.whl'}]",
            "sha256",
        ),
        (
            "[[packages]]\nname = 'x'\nwheels = [{name = 'x-1-py3-none-any.a/../../evil.whl', path = 'x'}]",
            "not the name of a file",
        ),
        ("[[packages]]\nname = 'x'\nvcs = {type = 'git', url = 'https://a.example/x'}", "x  ?has no wheel"),
    ],
)
def test_a_lock_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pylock.toml").write_text(text)
    with pytest.raises(LockError, match=said):
        read_lock(tmp_path / "pylock.toml", HOST)
    with pytest.raises(LockError, match="cannot read"):
        read_lock(tmp_path / "nowhere.toml", HOST)


# ---- what a host may download by itself


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://files.example/a-1.0-py3-none-any.whl", True),
        ("file:///srv/wheels/a-1.0-py3-none-any.whl", False),
        ("https://user:word@files.example/a-1.0-py3-none-any.whl", False),
        ("https://pip.example/a-1.0-py3-none-any.whl", False),
        ("https://uv.example/a-1.0-py3-none-any.whl", False),
        ("https://netrc.example/a-1.0-py3-none-any.whl", False),
    ],
)
def test_what_is_on_this_machine_or_needs_its_password_is_not_public(
    url: str, public: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A password in the address, in the configuration of pip or uv, or in .netrc."""
    logins = tmp_path / "netrc"
    logins.write_text("machine netrc.example login user password word\n")
    monkeypatch.setenv("NETRC", str(logins))
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:pw@pip.example/simple")
    monkeypatch.setenv("UV_INDEX", "lab=https://uv.example/simple")
    monkeypatch.setenv("UV_INDEX_LAB_PASSWORD", "pw")
    assert uv.is_public(url) is public


# ---- uv and Python for hosts


def test_other_hosts_get_the_same_uv_for_their_platform(index: Index) -> None:
    other = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
    version = uv.version()
    script = f"uv-{version}.data/scripts/uv"
    for platform in (f"manylinux_2_17_{other}", f"musllinux_1_1_{other}", f"musllinux_1_1_{os.uname().machine}"):
        index.add("uv", version, tag=f"py3-none-{platform}", files={script: platform})
    index.add("uv", f"{version}.1", tag=f"py3-none-manylinux_2_17_{other}")
    for libc, arch in (("glibc 2.36", other), ("musl 1.2.5", other), ("musl 1.2.5", os.uname().machine)):
        target = replace(HOST, arch=arch, libc=libc)
        path = tools.uv_for(target)
        assert path.name == "uv" and path.stat().st_mode & 0o777 == 0o755
        assert path.read_text() == f"{'musllinux_1_1' if 'musl' in libc else 'manylinux_2_17'}_{arch}"
        before = len(index.requests)
        assert tools.uv_for(target) == path
        assert len(index.requests) == before


def test_a_host_that_is_too_old_for_this_machines_uv_gets_another_build(index: Index) -> None:
    libc, needed = libc_ver(uv.program())
    if libc != "glibc" or needed == "2.17":
        pytest.skip("this uv runs on every Linux that has packages")
    machine = os.uname().machine
    script = f"uv-{uv.version()}.data/scripts/uv"
    index.add("uv", uv.version(), tag=f"py3-none-manylinux_2_17_{machine}", files={script: "old"})
    assert tools.uv_for(replace(HOST, arch=machine, libc=f"glibc {needed}")) == Path(uv.program())
    assert tools.uv_for(replace(HOST, arch=machine, libc="glibc 2.17")).read_text() == "old"


@pytest.fixture
def pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """uv's list of Pythons, with two archives of our own."""
    listed = {}
    data = "# system configuration generated and used by the sysconfig module\nbuild_time_vars = {}\n"
    for patch in (8, 9):
        root = tmp_path / f"root{patch}" / "python"
        (root / "bin").mkdir(parents=True)
        (root / "lib" / "python3.11").mkdir(parents=True)
        (root / "bin" / "python3.11").write_text("#!/bin/sh\n")
        (root / "lib" / "python3.11" / "_sysconfigdata__linux_x86_64-linux-gnu.py").write_text(data)
        archive = tmp_path / "mirror" / "20990101" / f"cpython-3.11.{patch}+20990101-x86_64-install_only.tar.gz"
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(root, "python")
        common = {"name": "cpython", "os": "linux", "major": 3, "minor": 11, "patch": patch, "prerelease": ""}
        common |= {"variant": None, "build": "20990101", "sha256": sha256(archive), "url": archive.as_uri()}
        x86 = {"arch": {"family": "x86_64", "variant": None}, "libc": "gnu"}
        listed[f"cpython-3.11.{patch}-linux-x86_64-gnu"] = common | x86
    path = tmp_path / "pythons.json"
    path.write_text(json.dumps(listed))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(path))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    return path


def test_the_python_that_uv_would_download_comes_as_its_archive(tmp_path: Path, pythons: Path) -> None:
    path = tools.python_for(HOST)
    newest = tmp_path / "mirror" / "20990101" / "cpython-3.11.9+20990101-x86_64-install_only.tar.gz"
    assert sha256(path) == sha256(newest)
    newest.unlink()
    assert tools.python_for(HOST) == path
    assert [entry.name for entry in (cache_folder() / "pythons").iterdir()] == ["cpython-3.11-linux-x86_64-gnu"]


def test_a_python_with_the_wrong_hash_is_refused(pythons: Path) -> None:
    pythons.write_text(re.sub(r'"sha256": "[0-9a-f]{60}', '"sha256": "' + "0" * 60, pythons.read_text()))
    for _ in range(2):
        with pytest.raises(LockError, match=r"(?s)cannot download Python 3\.11 for Linux x86_64.*Hash mismatch"):
            tools.python_for(HOST)
        assert list((cache_folder() / "pythons").iterdir()) == []


def test_a_mirror_for_pythons_is_asked(tmp_path: Path, pythons: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of uv's own list the address is changed; nothing of it is reachable here."""
    monkeypatch.delenv("UV_PYTHON_DOWNLOADS_JSON_URL")
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", (tmp_path / "elsewhere").as_uri())
    with pytest.raises(LockError, match=r"(?s)cannot download Python 3\.11.*elsewhere/\d+/cpython-3\.11"):
        tools.python_for(HOST)


# ---- uv's words


def test_of_a_chain_of_causes_the_address_and_the_last_one_are_kept() -> None:
    said = """error: Request failed after 3 retries in 7.3s
  cause: Failed to fetch: https://index.example/simple/torch/
  cause: error sending request for url (https://index.example/simple/torch/)
  cause: client error (Connect)
  cause: dns error
  cause: error resolving DNS
  cause: failed to lookup address information: Name or service not known
"""
    assert uv.reason(said).splitlines() == [
        "cause: Failed to fetch: https://index.example/simple/torch/",
        "cause: failed to lookup address information: Name or service not known",
    ]


def test_credentials_in_uvs_words_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uv.redact("at https://me:p@ss@a.example/x and http://tok@b.example") == (
        "at https://***@a.example/x and http://***@b.example"
    )
    monkeypatch.setenv("UV_INDEX", "lab=https://lab.example/simple")
    monkeypatch.setenv("UV_INDEX_LAB_PASSWORD", "hunter2")
    with pytest.raises(uv.UvFailed) as caught:
        uv.run_uv("pip", "no-such-command-hunter2")
    assert "hunter2" not in str(caught.value)


def test_the_default_index_is_that_of_uvs_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried for torch, too, although no variable names it."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "uv.toml").write_text('[[index]]\nurl = "https://mirror.example/simple"\ndefault = true\n')
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))
    assert uv.default_index() == ["https://mirror.example/simple"]
