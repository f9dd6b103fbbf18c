"""How an environment is built on a host: what is sent to it, what it downloads itself, and what its errors mean.

The host is replaced by a shell that notes the scripts; tests/env/test_environments.py has real ones.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage.index import Index, make_wheel, sha256

from skyfab._util.scripts import given, read
from skyfab.calls.image import Image
from skyfab.env import install
from skyfab.env.facts import Facts, Program, Target
from skyfab.env.install import Installation, Package, install_apt, missing, push, unfit
from skyfab.env.lock import Lock
from skyfab.env.wheels import Wheel, fetch
from skyfab.errors import HostUnfit
from skyfab.protocol.blobs import name_of
from skyfab.session.shell import ScriptFailed

pytestmark = pytest.mark.usefixtures("world")

TARGET = Target(system="Linux", arch="x86_64", libc="glibc 2.36", python="3.11")
PYTHONS = "https://github.com/astral-sh/python-build-standalone"
SCRIPTS = {read(f"env/{name}.sh"): name for name in ("missing", "push", "unpack_python", "apt", "build", "probe")}


class Host:
    """A shell on a host that has some packages and reaches some indexes."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, dict[str, str], list[str]]] = []
        """Name, variables and arguments of each script."""
        self.packages: dict[str, bytes] = {}
        self.modes: dict[str, int] = {}
        self.reaches: set[str] = set()
        self.fails: dict[str, list[ScriptFailed | None]] = {}
        self.went: list[tuple[str, str]] = []

    def run(self, script: str, *, feed: Iterable[bytes] = ()) -> str:
        name = next((name for text, name in SCRIPTS.items() if script.endswith(text)), script)
        head, _, rest = script.partition("\nset --")
        values = dict(word.partition("=")[::2] for word in shlex.split(head)) if name != script else {}
        arguments = shlex.split(rest.partition("\n")[0])
        self.ran.append((name, values, arguments))
        failures = self.fails.get(name, [])
        if failures and (failed := failures.pop(0)) is not None:
            raise failed
        if script.startswith('cd "$c" && rm -rf '):
            self.packages = {place: one for place, one in self.packages.items() if place[:64] not in script}
        if name == "missing":
            places = [line.partition(" ")[2] for line in values["packages"].split("\n")]
            return "\n".join(place for place in places if place not in self.packages)
        if name == "push":
            content = b"".join(feed)
            assert len(content) % tarfile.RECORDSIZE == 0, "tar would wait for the rest"
            assert content.endswith(bytes(2 * tarfile.BLOCKSIZE))
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                for entry in archive:
                    file = archive.extractfile(entry)
                    assert file is not None
                    self.packages[entry.name], self.modes[entry.name] = file.read(), entry.mode
        if name == "probe":
            return "".join(f"index {index}\n" for index in arguments if index in self.reaches)
        return "first line\n/c/pythons/x/bin/python3\n" if name == "unpack_python" else ""

    def go(self, python: str, *, provided: str = "true") -> str:
        self.went.append((python, provided))
        return "absent"

    def values(self, name: str) -> list[dict[str, str]]:
        return [values for script, values, _ in self.ran if script == name]

    def names(self) -> list[str]:
        return [name for name, _, _ in self.ran]


class Report:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []
        self.moves: list[tuple[str, int, int]] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def moved(self, what: str, done: int, total: int) -> None:
        self.moves.append((what, done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture
def wheels(index: Index, tmp_path: Path) -> list[Wheel]:
    """One of an index, and one of a folder of this machine."""
    made = [index.add("app", "1.0"), make_wheel(tmp_path / "folder", "own", "2.0")]
    urls = [f"{index.root}/files/{made[0].name}", made[1].as_uri()]
    return [
        Wheel(
            package=path.name.partition("-")[0],
            version=path.name.split("-")[1],
            filename=path.name,
            url=url,
            sha256=sha256(path),
            size=path.stat().st_size,
        )
        for path, url in zip(made, urls, strict=True)
    ]


Build = Callable[..., None]


@pytest.fixture
def build(host: Host, report: Report, wheels: list[Wheel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds on a host with uv and Python, unless options say otherwise."""
    uv, python = tmp_path / "uv", tmp_path / "python.tar.gz"
    uv.write_bytes(b"program")
    python.write_bytes(b"archive")
    monkeypatch.setattr(install, "uv_for", lambda target: uv)
    monkeypatch.setattr(install, "python_for", lambda target: python)

    def build(**options: Any) -> None:
        facts = {"uv": Program(path="/bin/uv", version="0.8.1"), **options.pop("facts", {})}
        about: dict[str, Any] = {"image": Image(pip=("app", "own")), "python": "/bin/python3", **options}
        lock = Lock(text="", wheels=tuple(about.pop("wheels", wheels)), digest="lock")
        Installation(
            shell=host,  # type: ignore[arg-type]
            session="s1",
            report=report,
            facts=Facts(**facts),
            target=TARGET,
            lock=lock,
            **about,
        ).build("digest")

    return build


def test_a_host_without_a_route_is_sent_everything(
    host: Host, report: Report, build: Build, wheels: list[Wheel]
) -> None:
    build()
    assert host.names() == ["probe", "missing", "push", "build"]
    lock, *rest = host.packages
    assert lock.endswith("/pylock.toml")
    assert rest == [f"{wheel.sha256}/{wheel.filename}" for wheel in wheels]
    assert all(f"../{wheel.sha256}/{wheel.filename}" in host.packages[lock].decode() for wheel in wheels)
    (values,) = host.values("build")
    assert values == {
        "digest": "digest",
        "session": "s1",
        "uv": "/bin/uv",
        "python": "/bin/python3",
        "lock": lock,
        "offline": "1",
    }
    assert set(host.modes.values()) == {0o600}
    assert report.steps == ["installing"] and report.notes == []
    size = sum(len(content) for content in host.packages.values())
    assert ("pushing", size, size) in report.moves
    assert {what for what, _, _ in report.moves} == {"fetching", "pushing"}


def test_what_is_there_is_not_sent_again(host: Host, build: Build) -> None:
    build()
    host.ran.clear()
    build()
    assert host.names() == ["probe", "missing", "build"]
    host.packages.pop(next(place for place in host.packages if place.endswith("own-2.0-py3-none-any.whl")))
    host.ran.clear()
    before = set(host.packages)
    build()
    assert host.names() == ["probe", "missing", "push", "build"]
    assert {place.partition("/")[2] for place in set(host.packages) - before} == {"own-2.0-py3-none-any.whl"}


def test_a_host_downloads_what_it_reaches(host: Host, build: Build, wheels: list[Wheel], index: Index) -> None:
    host.reaches = {f"{index.root}/"}
    build()
    lock, *rest = host.packages
    assert [place.partition("/")[2] for place in rest] == [wheels[1].filename], "the other one is only on this machine"
    assert f'url = "{wheels[0].url}"' in host.packages[lock].decode()
    assert host.values("build")[0]["offline"] == ""
    assert host.ran[0][2] == [f"{index.root}/", PYTHONS]


@pytest.mark.parametrize(("install_by", "sent"), [("push", 2), ("fetch", 1), ("auto", 2)])
def test_an_image_may_say_who_downloads(host: Host, build: Build, install_by: str, sent: int) -> None:
    build(image=Image(pip=("app", "own"), install=install_by))  # type: ignore[arg-type]
    assert len(host.packages) == 1 + sent
    assert ("probe" in host.names()) == (install_by != "push")


@pytest.mark.parametrize("version", ["", "0.7.9", "0.8.0"])
def test_a_uv_that_is_too_old_is_not_used(host: Host, build: Build, version: str) -> None:
    build(facts={"uv": Program(path="/bin/uv", version=version) if version else None})
    sent = [place for place in host.packages if place.endswith("/uv")]
    assert host.values("build")[0]["uv"] == ("/bin/uv" if version == "0.8.0" else sent[0])
    assert len(sent) == (version in ("", "0.7.9"))
    assert [host.modes[place] for place in sent] == [0o700 for _ in sent]


@pytest.mark.parametrize("reaches", [True, False])
def test_a_host_without_python_is_given_one_or_downloads_it(
    host: Host, report: Report, build: Build, reaches: bool
) -> None:
    host.reaches = {PYTHONS} if reaches else set()
    build(python=None)
    sent = [place for place in host.packages if place.endswith("/python.tar.gz")]
    (values,) = host.values("build")
    assert values["offline"] == ("" if reaches else "1")
    if reaches:
        assert (values["python"], sent) == ("3.11", [])
        assert report.steps == ["installing"]
    else:
        assert values["python"] == "/c/pythons/x/bin/python3"
        unpacked = {"digest": sent[0].partition("/")[0], "archive": sent[0]}
        assert host.values("unpack_python") == [unpacked, unpacked], "a relay needs it; later it is there"
        assert report.steps == ["fetching Python 3.11", "installing"]


def test_a_disk_without_room_is_an_error_before_anything_is_sent(host: Host, build: Build, wheels: list[Wheel]) -> None:
    build(facts={"free": 0})  # unknown
    size = sum(len(content) for content in host.packages.values())
    host.packages.clear()
    build(facts={"free": size})
    host.packages.clear()
    with pytest.raises(HostUnfit, match=r"the packages need .*, but its disk has .* free") as raised:
        build(facts={"free": size - 1})
    assert raised.value.hint is not None and raised.value.hint.startswith("free some space on it (skyfab gc)")
    assert host.packages == {}


# ---- wheels that are not those of the lock


def mismatch(package: str) -> ScriptFailed:
    return ScriptFailed(1, f"error: Hash mismatch for `{package}`\n")


def test_damaged_wheels_are_sent_again_and_leave_uvs_cache(host: Host, build: Build, wheels: list[Wheel]) -> None:
    host.fails["build"] = [mismatch("app")]
    build()
    names = host.names()
    assert names[:4] == ["probe", "missing", "push", "build"]
    words = [f"{folder}/{wheel.sha256}" for wheel in wheels for folder in ("packages", "blobs")]
    assert names[4] == f'cd "$c" && rm -rf {" ".join(words)}'
    assert names[5:] == ["missing", "push", "build"]
    assert [arguments for name, _, arguments in host.ran if name == "build"] == [[], ["app"]]


def test_a_wheel_that_was_damaged_on_this_machine_is_fetched_again(
    host: Host, build: Build, wheels: list[Wheel]
) -> None:
    for path in fetch(wheels).values():
        path.write_bytes(bytes(path.stat().st_size))
    host.fails["build"] = [mismatch("app")]
    build()
    sent = [host.packages[f"{wheel.sha256}/{wheel.filename}"] for wheel in wheels]
    assert [name_of(content) for content in sent] == [wheel.sha256 for wheel in wheels]


def test_wheels_that_the_host_has_downloaded_only_leave_uvs_cache(
    host: Host, build: Build, wheels: list[Wheel], index: Index
) -> None:
    host.reaches = {f"{index.root}/"}
    host.fails["build"] = [mismatch("app"), mismatch("app")]
    with pytest.raises(ScriptFailed):
        build(wheels=wheels[:1])
    assert host.names() == ["probe", "missing", "push", "build", "build"]


def test_other_failures_are_not_tried_again(host: Host, build: Build) -> None:
    host.fails["build"] = [ScriptFailed(2, "error: no")]
    with pytest.raises(ScriptFailed):
        build()
    assert host.names().count("build") == 1


# ---- Debian packages


def dpkg(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two Debian packages are installed, of the third only the configuration is left; others are not known."""
    program = folder / "bin" / "dpkg-query"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\nfor p; do :; done\ncase $p in git|libfoo:amd64) printf 'install ok installed 1:2.3-1';;\n"
        "vim) printf 'deinstall ok config-files 1';; *) exit 1;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/nowhere")


@pytest.mark.parametrize(
    ("packages", "missing"),
    [
        (("git", "libfoo:amd64", "git=1:2.3-1", "git=1:2.*"), ""),
        (("git=9.9", "git=2.3-1", "git=1:2.3", "git"), "git=9.9 git=2.3-1 git=1:2.3"),
        (("vim", "vim=1", "g++"), "vim vim=1 g++"),
    ],
)
def test_a_debian_package_must_have_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], missing: str
) -> None:
    dpkg(tmp_path, monkeypatch)
    done = subprocess.run(["/bin/sh", "-c", given(*packages) + read("env/apt.sh")], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (missing, 3 if missing else 0)


@pytest.mark.parametrize(
    ("status", "why"), [(3, "the host has no apt-get"), (4, "its user is not allowed to install packages")]
)
def test_debian_packages_that_cannot_be_installed(host: Host, status: int, why: str) -> None:
    host.fails["apt"] = [ScriptFailed(status, "git g++\n"), ScriptFailed(1, "broken")]
    with pytest.raises(HostUnfit) as raised:
        install_apt(host, ("git", "g++", "vim"))  # type: ignore[arg-type]
    assert raised.value.message == f"missing apt packages: git, g++ ({why})"
    assert raised.value.hint == "ask an administrator: sudo apt-get install git g++"
    with pytest.raises(ScriptFailed):
        install_apt(host, ("git",))  # type: ignore[arg-type]
    host.fails["apt"] = [ScriptFailed(status, "git -y;reboot\n")]
    with pytest.raises(HostUnfit) as raised:
        install_apt(host, ("git", "vim"))  # type: ignore[arg-type]
    assert raised.value.hint == "ask an administrator: sudo apt-get install git"


# ---- packages


def test_an_archive_has_the_content_and_reports_progress(host: Host, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 3_000_000)
    packages = [
        Package.of_text("empty", ""),
        Package.of_file(tmp_path / "large", program=True),
        Package.of_text("block", "y" * 512),
    ]
    moves: list[tuple[int, int]] = []
    push(host, packages, session="s1", progress=lambda *move: moves.append(move))  # type: ignore[arg-type]
    assert host.packages == {packages[0].place: b"", packages[1].place: b"x" * 3_000_000, packages[2].place: b"y" * 512}
    assert moves[-1] == (3_000_512, 3_000_512) and len(moves) == 5
    assert missing(host, packages) == []  # type: ignore[arg-type]
    del host.packages[packages[1].place]
    assert missing(host, packages) == [packages[1]]  # type: ignore[arg-type]


def test_a_package_may_have_several_names(tmp_path: Path) -> None:
    """Two indexes may write the name of a wheel differently."""
    script = given(c=str(tmp_path), session="s1") + read("env/push.sh")
    for name in ("Foo.whl", "foo.whl", "foo.whl"):
        packages = [Package.of_text(name, "same"), Package.of_text("other", name)]
        archive = b"".join(install._archive(packages, 0, lambda done, total: None))
        subprocess.run(["sh", "-c", script], input=archive, check=True)
    assert sorted(path.name for path in (tmp_path / "packages" / packages[0].sha256).iterdir()) == [
        "Foo.whl",
        "foo.whl",
    ]
    assert len(list((tmp_path / "packages").iterdir())) == 3


def test_a_package_that_is_damaged_on_the_host_is_missing(tmp_path: Path) -> None:
    """After a power cut a file may be empty or too short; so may the blob, which is the same file."""
    c = tmp_path / "my cache"
    (c / "blobs").mkdir(parents=True)
    packages = [Package.of_text(name, name * 9) for name in ("good", "short", "empty", "absent", "relayed", "odd name")]
    unknown = [replace(Package.of_text(name, name), size=0) for name in ("any", "none")]
    content = {
        "good": "good" * 9,
        "short": "short",
        "empty": "",
        "odd name": "odd name" * 9,
        "any": "other",
        "none": "",
    }
    for package in (*packages, *unknown):
        blob = c / "blobs" / package.sha256
        if package.filename == "relayed":
            blob.write_text("relayed" * 9)
        elif package.filename in content:
            path = c / "packages" / package.place
            path.parent.mkdir(parents=True)
            path.write_text(content[package.filename])
            blob.hardlink_to(path)

    class Here:
        def run(self, script: str) -> str:
            return subprocess.run(
                ["sh", "-c", given(c=str(c)) + script], check=True, capture_output=True, text=True
            ).stdout

    lacking = missing(Here(), [*packages, *unknown])  # type: ignore[arg-type]
    assert [package.filename for package in lacking] == ["short", "empty", "absent", "none"]
    left = {path.name for path in (c / "packages").glob("*/*")}
    assert left == {"good", "relayed", "odd name", "any"}
    assert len(list((c / "blobs").iterdir())) == len(left)


def test_a_file_that_becomes_shorter_while_it_is_sent(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    package = Package.of_file(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"x" * 9)
    with pytest.raises(OSError, match="file was truncated while it was read"):
        push(host, [package], session="s1", progress=lambda done, total: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "text", "hint"),
    [
        ("", "a script exited with 7", None),
        ("error: No space left on device", "No space left on device", "free some space"),
        ("mkdir: Read-only file system", "mkdir: Read-only file system", "choose a writable folder"),
        ("error: hash mismatch for app", "hash mismatch for app", "the file in the index has changed"),
        ("odd https://me:secret@x.example/y", "odd https://***@x.example/y", None),
    ],
)
def test_a_script_that_fails_is_an_error_of_its_host(output: str, text: str, hint: str | None) -> None:
    error = unfit(ScriptFailed(7, output), "node1")
    assert (error.host, error.message) == ("node1", f"cannot build its environment: {text}")
    assert error.hint is None if hint is None else str(error.hint).startswith(hint)


def test_two_hosts_unpack_an_interpreter_into_a_shared_cache_at_once(tmp_path: Path) -> None:
    """Their processes may have the same number; the second one to end uses what the first has made."""
    (tmp_path / "bin").mkdir()
    other = "$c/pythons/abc/python/bin"
    tar = tmp_path / "bin" / "tar"  # while it works, another host ends
    tar.write_text(f'#!/bin/sh\nls -A "$c/pythons" >"$c/drafts"\nmkdir -p "{other}"; : >"{other}/python3"\n')
    tar.chmod(0o700)
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "c": str(tmp_path)}
    script = given(digest="abc", archive="abc/python.tar.gz") + read("env/unpack_python.sh")
    done = subprocess.run(["/bin/sh", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{tmp_path}/pythons/abc/python/bin/python3"]
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("pythons/*/*")] == ["pythons/abc/python"]
    assert (tmp_path / "drafts").read_text().startswith(f".in-abc-{os.uname().nodename}-")
