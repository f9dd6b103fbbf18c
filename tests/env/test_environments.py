"""Environments on hosts that have nothing but sshd and a shell: pushed or fetched, built once, never by halves."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from stage import remote
from stage.index import Index, make_wheel, sha256
from stage.spot import until
from stage.threads import at_once

import skyfab as sky
from skyfab.env.pipconf import uv_environment
from skyfab.env.resolve import LockError
from skyfab.lab import Lab, LabHost
from skyfab.ui.events import Event, HostState

MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
SECRET = secrets.token_hex(12)
pytestmark = pytest.mark.usefixtures("world")


version_of = sky.function(remote.version_of)
where = sky.function(remote.where)


MACHINE = dict(os.environ)
"""The settings of this machine, before the tests hide them."""


@pytest.fixture
def torch_wheels(monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a torch that fits this machine; the rest comes from where this machine gets its packages."""
    import torch

    version = torch.__version__
    for folder in uv_environment(MACHINE).get("UV_FIND_LINKS", "").split(","):
        path = Path(unquote(urlsplit(folder).path))
        if folder and any(path.glob(f"torch-{version}-*.whl")):
            for name, value in MACHINE.items():
                if name.startswith(("PIP_", "UV_")) and name != "PIP_FIND_LINKS":
                    monkeypatch.setenv(name, value)
            return str(path)
    pytest.skip(f"pip's configuration names no folder with torch {version}")


@pytest.fixture
def open_index(world: None, namespaces: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The default index, where hosts can reach it."""
    with Index(tmp_path / "open", address=address_towards(namespaces.hosts[0])) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.url)
        yield found


def address_towards(host: LabHost) -> str:
    """This machine's address, as the host knows it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.address, 9))
        return str(probe.getsockname()[0])


def pool(hosts: list[sky.Host], seen: list[Event] | None = None, **image: object) -> sky.Compute:
    made = sky.Compute(hosts, image=sky.Image(**image), ui="none")  # type: ignore[arg-type]
    if seen is not None:
        made.events.subscribe(seen.append)
    return made


def steps(seen: list[Event]) -> list[str]:
    return [event.detail for event in seen if isinstance(event, HostState) and event.state == "preparing"]


def listing(lab: Lab, host: sky.Host, inner: str) -> set[str]:
    """What is in a folder of the host's cache, hidden things included; locks excepted."""
    found = lab[host.name].run(["ls", "-A", f"{host.cache}/{inner}"], check=False).stdout.split()
    return {name for name in found if not name.startswith(".lock-")}


# ---- the two ways to a host


@pytest.mark.parametrize("transport", ["openssh", "fabric"])  # as root, and as an ordinary user
def test_a_host_without_a_route_gets_its_packages_from_here(
    transport: str, fresh: Callable[..., list[sky.Host]], index: Index, namespaces: Lab
) -> None:
    index.add("shelf", "1.0", requires=["book"])
    index.add("book", "2.0")
    hosts = fresh(transport, 2)
    seen: list[Event] = []
    with pool(hosts, seen, pip=["shelf"]) as compute:
        assert [future.result() for future in [version_of("book") > compute for _ in range(2)]] == ["2.0"] * 2
        assert all(prefix.startswith(hosts[0].cache) for _, prefix in where() @ compute)
    assert steps(seen).count("probing") == steps(seen).count("installing") == 2
    assert listing(namespaces, hosts[0], "envs") == listing(namespaces, hosts[1], "envs")


@pytest.mark.slow
def test_a_finished_environment_is_used_again_by_all_programs_unless_it_was_damaged(
    fresh: Callable[..., list[sky.Host]],
    index: Index,
    namespaces: Lab,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Another program has never seen the host, and must probe it; nothing is sent or installed."""
    index.add("shelf", "1.0")
    hosts = fresh()
    pool(hosts, pip=["shelf"]).__enter__().close()
    again: list[Event] = []
    with pool(hosts, again, pip=["shelf"]) as compute:
        assert version_of("shelf") >> compute == "1.0"
    assert steps(again) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    other: list[Event] = []
    with pool(hosts, other, pip=["shelf"]) as compute:
        assert version_of("shelf") >> compute == "1.0"
    assert steps(other) == ["probing", "resolving"]
    (name,) = listing(namespaces, hosts[0], "envs")
    namespaces[hosts[0].name].run(["rm", f"{hosts[0].cache}/envs/{name}/bin/python"])
    with pool(hosts, pip=["shelf"]) as compute:
        assert version_of("shelf") >> compute == "1.0"


@pytest.mark.slow
def test_an_index_serves_its_packages_and_no_others(
    fresh: Callable[..., list[sky.Host]],
    namespaces: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newer torch on the other index must lose, and the scoped index's own `shelf` as well."""
    address = address_towards(namespaces.hosts[0])
    with Index(tmp_path / "everything", address=address) as usual, Index(tmp_path / "wheels", address=address) as own:
        monkeypatch.setenv("PIP_INDEX_URL", usual.url)
        usual.add("torch", "9.9.9")
        usual.add("shelf", "1.0", requires=["torch"])
        own.add("torch", "2.0.0")
        own.add("shelf", "7.7")
        with pool(fresh(), pip=["shelf"], pip_indexes=[sky.PipIndex(own.url, ["torch"])]) as compute:
            assert version_of("torch") >> compute == "2.0.0"
            assert version_of("shelf") >> compute == "1.0"


@pytest.mark.slow
def test_an_index_with_a_password_is_asked_from_here_alone(
    fresh: Callable[..., list[sky.Host]], namespaces: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address_towards(namespaces.hosts[0])
    with Index(tmp_path / "private", address=address, user="ada", password=SECRET) as private:
        monkeypatch.setenv("PIP_INDEX_URL", private.secret_url)
        private.add("shelf", "1.0")
        hosts = fresh()
        with pool(hosts, pip=["shelf"]) as compute:
            assert version_of("shelf") >> compute == "1.0"
            words = [word for process in namespaces[hosts[0].name].processes() for word in process.cmdline]
    assert not any(SECRET in word for word in words)
    found = namespaces[hosts[0].name].run(["grep", "-rl", SECRET, hosts[0].cache], check=False)
    assert found.stdout == ""


# ---- what is sent, and how often


@pytest.mark.slow
def test_two_pools_at_once_build_one_environment(
    fresh: Callable[..., list[sky.Host]], index: Index, namespaces: Lab
) -> None:
    index.add("shelf", "1.0")
    hosts = fresh()

    def use(_: int) -> str:
        with pool(hosts, pip=["shelf"]) as compute:
            return version_of("shelf") >> compute

    assert at_once(use, range(3)) == ["1.0"] * 3
    assert len(listing(namespaces, hosts[0], "envs")) == 1
    assert not any(name.startswith(".") for name in listing(namespaces, hosts[0], "packages"))


# ---- what goes wrong


def test_a_package_that_was_damaged_on_the_host_is_sent_again(
    fresh: Callable[..., list[sky.Host]], index: Index, namespaces: Lab
) -> None:
    wheel = index.add("shelf", "1.0")
    hosts = fresh()
    other = make_wheel(index.folder.parent / "evil", "shelf", "1.0", files={"shelf/more.py": "evil = True"})
    place = f"{hosts[0].cache}/packages/{sha256(wheel)}"
    namespaces[hosts[0].name].run(["mkdir", "-p", place])
    namespaces[hosts[0].name].path(f"{place}/{wheel.name}").write_bytes(other.read_bytes())
    with pool(hosts, pip=["shelf"]) as compute:
        assert version_of("shelf") >> compute == "1.0"
    found = namespaces[hosts[0].name].run(["find", hosts[0].cache, "-name", "more.py"]).stdout
    assert found == ""


@pytest.mark.slow
def test_a_wheel_that_was_replaced_under_its_name_and_version_is_fetched_again(
    fresh: Callable[..., list[sky.Host]],
    open_index: Index,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    namespaces: Lab,
) -> None:
    """A host that has installed the old one still has it in uv's cache."""
    open_index.lasting = True
    open_index.add("shelf", "1.0", requires=["book"])
    open_index.add("book", "2.0")
    hosts = fresh()
    pool(hosts, pip=["shelf"]).__enter__().close()
    open_index.add("shelf", "1.0", requires=["book"], files={"shelf/__init__.py": "version = 'of today'\n"})
    for name in ("XDG_CACHE_HOME", "UV_CACHE_DIR"):  # a program that has never seen the old one
        monkeypatch.setenv(name, str(tmp_path / name))
    asked = open_index.count("book-2.0")
    with pool(hosts, pip=["shelf"]) as compute:
        assert version_of("shelf") >> compute == "of today"
    assert len(listing(namespaces, hosts[0], "envs")) == 2
    assert open_index.count("book-2.0") - asked <= 3, "the others come from the cache"


@pytest.mark.slow
def test_a_build_that_was_killed_leaves_nothing_in_the_way(
    fresh: Callable[..., list[sky.Host]], index: Index, namespaces: Lab
) -> None:
    """uv is killed in the middle of its work, and the shell that started it."""
    index.add("shelf", "1.0")
    hosts = fresh()
    host = namespaces[hosts[0].name]
    slow = host.path("/usr/local/bin/uv")
    slow.write_text("#!/bin/sh\ncase $1 in --version) echo uv 99.0.0;; venv) mkdir -p /tmp/x; exec sleep 600;; esac\n")
    slow.chmod(0o755)
    try:
        made = pool(hosts, pip=["shelf"])

        def kill() -> None:
            until(lambda: any(process.cmdline[:2] == ("sleep", "600") for process in host.processes()))
            for process in host.processes():
                if process.cmdline[:2] == ("sleep", "600") or "skyfab" in process.cmdline[:4]:
                    host.run(["kill", "-9", str(process.pid)], check=False)

        def build() -> Exception | None:
            try:
                made.open()
            except sky.HostError as error:
                return error
            return None

        failed, _ = at_once(lambda action: action(), [build, kill])
        assert isinstance(failed, sky.HostError)
    finally:
        slow.unlink()
    with pool(hosts, pip=["shelf"]) as compute:
        assert version_of("shelf") >> compute == "1.0"
    assert len(listing(namespaces, hosts[0], "envs")) == 1


def test_a_disk_that_fills_up_is_said_and_nothing_is_left_half_made(
    fresh: Callable[..., list[sky.Host]], index: Index, namespaces: Lab
) -> None:
    """It has room for what is sent, and not for what comes out of it."""
    index.add("shelf", "1.0", files={"shelf/zeros.bin": bytes(60_000_000)})
    hosts = fresh()
    host = namespaces[hosts[0].name]
    host.run(["mkdir", "-p", hosts[0].cache])
    host.small_disk(hosts[0].cache, 75)
    with pytest.raises(sky.HostUnfit, match="No space left") as raised:
        pool(hosts, pip=["shelf"]).open()
    assert "skyfab gc" in str(raised.value.hint)
    assert not any(name.startswith(".in") for name in listing(namespaces, hosts[0], "packages"))
    assert listing(namespaces, hosts[0], "envs") == set()


def test_a_package_that_does_not_exist_is_one_error_for_all_hosts(
    fresh: Callable[..., list[sky.Host]], index: Index, namespaces: Lab
) -> None:
    hosts = fresh("openssh", 2)
    with pytest.raises(LockError, match="no-such-thing") as raised:
        pool(hosts, pip=["no-such-thing"]).open()
    assert raised.value.exit_code == 2
    assert listing(namespaces, hosts[0], "envs") == set()


def test_a_wheel_that_is_not_what_the_lock_says_is_not_installed(
    fresh: Callable[..., list[sky.Host]], index: Index, namespaces: Lab
) -> None:
    wheel = index.add("shelf", "1.0")
    hosts = fresh()
    with Index(index.folder) as other:
        pylock = other.folder.parent / "pylock.toml"
        pylock.write_text(
            'lock-version = "1.0"\ncreated-by = "a test"\n[[packages]]\nname = "shelf"\nversion = "1.0"\n'
            f'wheels = [{{ url = "{other.root}/files/{wheel.name}", hashes = {{ sha256 = "{"0" * 64}" }} }}]\n'
        )
        with pytest.raises(sky.SkyfabError, match=f"(?s)shelf.*{'0' * 64}"):
            pool(hosts, lock=str(pylock)).open()
    assert listing(namespaces, hosts[0], "envs") == set()


# ---- interpreters, Debian packages, variables


@pytest.mark.slow
def test_a_host_without_python_is_given_one(
    fresh: Callable[..., list[sky.Host]], index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two, with and without packages. What uv would download from afar is made here from Debian's interpreter."""
    binary, library = Path(f"/usr/bin/python{MINOR}"), Path(f"/usr/lib/python{MINOR}")
    if not binary.exists() or not library.exists():
        pytest.skip(f"no Debian Python {MINOR} to make an archive from")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(downloads(tmp_path, binary, library)))
    with Lab.start(count=2, python="none") as lab:
        bare = [replace(found, cache="/var/tmp/bare") for found in sky.Inventory.of(lab.inventory).hosts.values()]
        index.add("shelf", "1.0")
        for image in ({"pip": ["shelf"]}, {}):
            with pool(bare, **image) as compute:
                for host, (executable, _) in zip(lab.hosts, where() @ compute, strict=True):
                    assert executable.startswith("/var/tmp/bare/envs/")
                    assert host.path(str(Path(executable).parent)).exists()
                if image:
                    assert version_of("shelf") @ compute == ["1.0"] * 2
                    uv = lab.hosts[1].run(["find", "/var/tmp/bare/blobs", "-size", "+8M"]).stdout.split()
                    assert len(uv) == 1, "relayed by the interpreters that they have been given"


def downloads(tmp_path: Path, binary: Path, library: Path) -> Path:
    """A list of interpreters, as uv reads it, with one entry for this machine."""
    import platform

    archive = tmp_path / f"cpython-{MINOR}.99-install_only.tar.gz"
    skipped = ("/dist-packages", "/__pycache__", "/test", "/config-", "sitecustomize.py")

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if any(part in entry.name for part in skipped) else entry

    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(binary, f"python/bin/python{MINOR}")
        for name in ("python3", "python"):
            link = tarfile.TarInfo(f"python/bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, f"python{MINOR}"
            tar.addfile(link)
        tar.add(library, f"python/lib/python{MINOR}", filter=wanted)
    major, minor = map(int, MINOR.split("."))
    arch = platform.machine()
    entry = {
        "name": "cpython",
        "arch": {"family": arch, "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": major,
        "minor": minor,
        "patch": 99,
        "prerelease": "",
        "url": archive.as_uri(),
        "sha256": sha256(archive),
        "variant": None,
        "build": None,
    }
    listed = tmp_path / "downloads.json"
    listed.write_text(json.dumps({f"cpython-{MINOR}.99-linux-{arch}-gnu": entry}))
    return listed


def test_users_who_may_not_install_debian_packages_see_what_to_ask_for(fresh: Callable[..., list[sky.Host]]) -> None:
    with pytest.raises(sky.HostUnfit) as raised:
        pool(fresh("fabric"), apt=["coreutils", "a-missing-package"]).open()
    assert raised.value.hint == "ask an administrator: sudo apt-get install a-missing-package"


def test_variables_reach_the_function_and_nothing_else(fresh: Callable[..., list[sky.Host]], namespaces: Lab) -> None:
    @sky.function
    def token() -> str:
        return os.environ["TOKEN"]

    hosts = fresh()
    host = namespaces[hosts[0].name]
    with pool(hosts, env={"TOKEN": f"{SECRET}; $(id)"}) as compute:
        assert token() >> compute == f"{SECRET}; $(id)"
        assert not any(SECRET in word for process in host.processes() for word in process.cmdline)
        assert host.run(["grep", "-rl", SECRET, hosts[0].cache], check=False).stdout == ""


# ---- the whole round trip


@pytest.mark.torch
@pytest.mark.timeout(330)  # torch is sent and installed
@pytest.mark.soak
def test_a_model_is_trained_in_an_environment_made_for_it_and_comes_back(
    namespaces: Lab, tmp_path: Path, torch_wheels: str
) -> None:
    """The example, on a host without a route out and with nothing installed: torch comes from its own index alone."""
    script = Path(__file__).parents[2] / "examples" / "models" / "round_trip.py"
    found = sky.Inventory.of(namespaces.inventory)
    host = replace(found.hosts["node1"], python="auto", cache="/var/tmp/round-trip")
    inventory = tmp_path / "inventory.toml"
    inventory.write_text(
        f'[hosts.node1]\naddress = "{host.address}"\nuser = "root"\nidentity = "{host.identity}"\n'
        f'host_key = "{host.host_key}"\ncache = "{host.cache}"\n'
    )
    argv = [sys.executable, str(script), "node1", f"--index={torch_wheels}"]
    env = {**os.environ, "SKYFAB_INVENTORY": str(inventory)}
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300)
        assert ran.returncode == 0, ran.stderr
        before, trained, after, tied = ran.stdout.splitlines()
        assert int(before.split()[1].rstrip("%")) < 40
        assert trained.startswith("trained on node1, Python ")
        assert int(after.split()[1].rstrip("%")) > 90
        assert tied == "tied weights: still tied"
    finally:
        namespaces["node1"].run(["rm", "-rf", host.cache])
