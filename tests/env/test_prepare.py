"""`Preparation`: which interpreter a host is asked for first, and what is done for a host that has none."""

from __future__ import annotations

import platform
import threading
from pathlib import Path
from typing import Any

import pytest
from stage.index import Index

import skyfab as sky
from skyfab._util.scripts import given, read
from skyfab.calls.image import Image
from skyfab.env import facts_cache, install, lock, prepare
from skyfab.env.facts import Facts, Program, Target
from skyfab.env.prepare import Preparation, check
from skyfab.errors import HostUnfit, SkyfabError, UsageError
from skyfab.session.bootstrap import open_shell
from skyfab.session.shell import ScriptFailed
from skyfab.ssh.local import Local

pytestmark = pytest.mark.usefixtures("world")

HOST = sky.Host(name="node1", address="10.0.0.1")
OTHER = sky.Host(name="node2", address="10.0.0.2")
FACTS = Facts(boot="b1", system="Linux", arch="x86_64", libc="glibc 2.36", cache="/c")
TARGET = Target.of(FACTS, "3.11")
PACKED = Image(pip=("app",))


def test_the_environment_that_a_host_should_have_is_asked_for_first(index: Index) -> None:
    index.add("app", "1.0")
    preparation = Preparation(PACKED, [HOST], "3.11")
    assert preparation.guess(HOST) == "none", "nothing is known about it"
    store(Facts(system="Linux", arch="x86_64", libc="glibc 2.36"))
    assert preparation.guess(HOST) == "none", "it may be another machine by now"
    store(FACTS)
    assert preparation.guess(HOST) == "none", "there is no lock"
    digest = preparation.digest(lock.make_lock(PACKED, TARGET), None)
    assert preparation.guess(HOST) == f"env/{digest}/b1"
    assert len(digest) == 40
    store(Facts(**{**fields(FACTS), "pythons": (python("/opt/bin/python3.11", "3.11.2"),)}))
    digest = preparation.digest(lock.make_lock(PACKED, TARGET), "/opt/bin/python3.11")
    assert preparation.guess(HOST) == f"env/{digest}/b1"


def store(facts: Facts, host: sky.Host = HOST) -> None:
    import dataclasses

    facts_cache.store(host, "hosts", dataclasses.asdict(facts))


def test_facts_are_kept_for_each_login_and_cache() -> None:
    store(FACTS)
    assert facts_cache.load(HOST) == FACTS
    changes: list[dict[str, Any]] = [{"user": "ada"}, {"port": 2222}, {"cache": "/d"}, {"address": "10.0.0.9"}]
    for change in [*changes, {"transport": "local"}]:
        other = sky.Host(**{"name": "node1", "address": "10.0.0.1", **change})
        assert facts_cache.load(other) is None, change
    assert facts_cache.load(sky.Host(name="another", address="10.0.0.1")) == FACTS, "its name here does not matter"
    one, two = sky.Host(name="one"), sky.Host(name="two")
    facts_cache.store(one, "hosts", {"boot": "b2"})
    assert facts_cache.load(one) == Facts(boot="b2") and facts_cache.load(two) is None


def test_facts_are_those_of_the_last_probe(tmp_path: Path) -> None:
    here = sky.Host(name="here", cache=str(tmp_path))
    with open_shell(here, Local(here)) as shell:
        facts = facts_cache.probe(here, shell)
    assert (facts.system, facts.cache) == (platform.system(), str(tmp_path))
    assert facts_cache.load(here) == facts


# ---- a host is prepared


class Shell:
    """A host that is probed, and starts what it has."""

    def __init__(self, facts: Facts, *, has: bool = False) -> None:
        self.facts = facts
        self.has = has
        self.went: list[str] = []
        self.ran: list[str] = []

    def run(self, script: str) -> str:
        self.ran.append(script)
        return ""

    def go(self, python: str, *, provided: str = "true") -> str:
        self.went.append(python)
        return "ready" if self.has or provided == "true" else "absent"


class Report:
    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def moved(self, what: str, done: int, total: int) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The digests of environments that are built, each with what was known then."""
    found: list[tuple[str, Any]] = []

    def build(self: install.Installation, digest: str) -> None:
        found.append((digest, self))
        self.shell.has = True  # type: ignore[attr-defined]

    monkeypatch.setattr(facts_cache, "probe", lambda host, shell: shell.facts)
    monkeypatch.setattr(install.Installation, "build", build)
    monkeypatch.setattr(prepare, "_OTHERS", 0.05)
    return found


def prepared(preparation: Preparation, shell: Shell, host: sky.Host = HOST) -> tuple[str | None, list[str]]:
    report = Report()
    found = preparation.prepare(host, shell, session="s1", report=report)  # type: ignore[arg-type]
    return found, report.steps


def python(path: str, version: str) -> Program:
    return Program(path=path, version=version)


def test_without_packages_an_interpreter_of_the_host_is_started(built: list[Any]) -> None:
    pythons = (python("/bin/python3.9", "3.9.2"), python("/opt/my python", "3.11.7"), python("/x", "3.11.8"))
    shell = Shell(Facts(pythons=pythons))
    assert prepared(Preparation(Image(), [HOST], "3.11"), shell) == ("ready", ["probing"])
    assert (shell.went, built) == (["'/opt/my python'"], [])
    named = sky.Host(name="node1", python="/usr/bin/python3")
    shell = Shell(Facts())
    prepared(Preparation(Image(), [named], "3.11"), shell, named)
    assert shell.went == ["/usr/bin/python3"]


def test_without_an_interpreter_an_environment_is_built(built: list[Any]) -> None:
    shell = Shell(Facts(**{**fields(FACTS), "pythons": (python("/bin/python3", "3.12.1"),)}))
    found, steps = prepared(Preparation(Image(), [HOST], "3.11"), shell)
    assert (found, steps) == ("ready", ["probing", "resolving"])
    ((_, installation),) = built
    assert installation.python is None


def fields(facts: Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__slots__}


def test_an_environment_is_built_once(index: Index, built: list[Any]) -> None:
    index.add("app", "1.0")
    facts = Facts(**{**fields(FACTS), "pythons": (python("/bin/python3", "3.11.2"),)})
    shell = Shell(facts)
    preparation = Preparation(PACKED, [HOST], "3.11")
    assert prepared(preparation, shell)[0] == "ready"
    ((digest, installation),) = built
    assert shell.went == [f'"$c"/envs/{digest}/bin/python'] * 2
    assert (installation.session, installation.python, installation.target) == ("s1", "/bin/python3", TARGET)
    assert [wheel.package for wheel in installation.lock.wheels] == ["app"]
    assert prepared(preparation, shell)[0] == "ready" and len(built) == 1


def test_debian_packages_are_looked_for_although_the_environment_is_there(built: list[Any]) -> None:
    """Another machine may have built it in a home folder that both share, or this container is a new one."""
    shell = Shell(FACTS, has=True)
    preparation = Preparation(Image(apt=("git", "g++")), [HOST], "3.11")
    assert prepared(preparation, shell) == ("ready", ["probing", "resolving", "installing apt packages"])
    (script,) = shell.ran
    assert script == given("git", "g++") + read("env/apt.sh")
    assert built == []


def test_the_name_of_an_environment_is_that_of_all_it_is_built_from(index: Index) -> None:
    index.add("app", "1.0")
    index.add("other", "1.0")

    def digest(python: str | None = None, **options: Any) -> str:
        image = Image(**options)
        return Preparation(image, [HOST], "3.11").digest(lock.make_lock(image, TARGET), python)

    assert digest(pip=("app",), apt=("a", "b")) == digest(pip=("app",), apt=("b", "a"))
    images: list[dict[str, Any]] = [{"pip": ("app",)}, {"pip": ("other",)}, {"pip": ("app",), "apt": ("a",)}]
    images += [{"pip": ("app",), "python": path} for path in ("/usr/bin/python3.11", "/opt/bin/python3.11")]
    assert len({digest(**image) for image in images}) == 5


def test_hosts_with_one_cache_and_other_interpreters_have_environments_of_their_own(
    index: Index, built: list[Any]
) -> None:
    """A build deletes what another host uses if the interpreter's path does not exist on its own host."""
    index.add("app", "1.0")
    preparation = Preparation(PACKED, [HOST, OTHER], "3.11")
    for host, path in ((HOST, "/usr/bin/python3.11"), (OTHER, "/opt/bin/python3.11")):
        facts = Facts(**{**fields(FACTS), "pythons": (python(path, "3.11.2"),)})
        prepared(preparation, Shell(facts), host)
    assert len({digest for digest, _ in built}) == 2


def test_a_disk_without_programs(built: list[Any]) -> None:
    with pytest.raises(HostUnfit, match="cannot run programs from /c: its disk is mounted noexec") as raised:
        prepared(Preparation(Image(), [HOST], "3.11"), Shell(Facts(cache="/c", noexec=True)))
    assert raised.value.host == "node1"


def test_errors_name_their_host(built: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> Any:
        def build(self: install.Installation, digest: str) -> None:
            raise error

        monkeypatch.setattr(install.Installation, "build", build)
        with pytest.raises(SkyfabError) as raised:
            prepared(Preparation(Image(), [HOST], "3.11"), Shell(FACTS))
        return raised.value

    assert fail(ScriptFailed(1, "No space left")).host == "node1"
    assert fail(UsageError("x")).host == "node1"
    assert fail(UsageError("x", host="node7")).host == "node7"


# ---- several hosts


def test_a_pool_waits_for_all_its_hosts_before_it_resolves(built: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has the version that suits the first of all targets."""
    together: list[list[Target]] = []
    make_lock = lock.make_lock

    def noted(image: Image, target: Target, **options: Any) -> Any:
        together.append(options["together"])
        return make_lock(image, target, **options)

    monkeypatch.setattr(lock, "make_lock", noted)
    monkeypatch.setattr(prepare, "_OTHERS", 60.0)
    preparation = Preparation(Image(), [HOST, OTHER], "3.11")
    thread = threading.Thread(target=lambda: prepared(preparation, Shell(FACTS)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and together == []
    gpu = Target(system="Linux", arch="x86_64", libc="glibc 2.36", python="3.11", driver="550.1")
    preparation.meet(OTHER, gpu)
    thread.join(60)
    assert together == [sorted([TARGET, gpu], key=repr)]
    absent = Preparation(Image(), [HOST, OTHER], "3.11")
    absent.meet(OTHER, None)
    prepared(absent, Shell(FACTS))
    assert together[-1] == [TARGET]


def test_torch_of_a_host_that_was_used_alone_is_not_that_of_a_pool(index: Index) -> None:
    """A host that is used alone gets the newest torch for it, and keeps that environment."""
    for arch, version in (("x86_64", "2.14.0"), ("x86_64", "2.13.0"), ("aarch64", "2.13.0")):
        index.add("torch", f"{version}+cpu", tag=f"cp311-cp311-manylinux_2_28_{arch}")
    image = Image(pip=("torch",))
    other = Facts(**{**fields(FACTS), "arch": "aarch64"})
    together = sorted([TARGET, Target.of(other, "3.11")], key=repr)
    assert [lock.make_lock(image, target).torch for target in together] == ["2.13.0", "2.14.0"]
    store(FACTS)
    preparation = Preparation(image, [HOST, OTHER], "3.11")
    assert preparation.guess(HOST) == "none", "nothing is known about the other host"
    assert Preparation(image, [HOST], "3.11").guess(HOST) != "none"
    store(other, OTHER)
    preparation = Preparation(image, [HOST, OTHER], "3.11")
    assert preparation.guess(HOST) == "none", "there is no lock for both hosts"
    common = lock.make_lock(image, TARGET, together=together)
    assert common.torch == "2.13.0"
    assert preparation.guess(HOST) == f"env/{preparation.digest(common, None)}/b1"


# ---- images that are wrong


def test_an_image_that_cannot_be_is_refused_before_any_host_is_contacted(tmp_path: Path) -> None:
    for good in (Image(), Image(python="3.11"), Image(python="3.11.4"), Image(python="/bin/python3"), PACKED):
        check(good, "3.11")
    for bad in (Image(python="3.12"), Image(python="3.1")):
        with pytest.raises(UsageError, match=r"but this program runs 3\.11: hosts must run the same Python") as raised:
            check(bad, "3.11")
        assert str(raised.value.hint).startswith(f"run this program with Python {bad.python}")
    options: list[dict[str, Any]] = [{"pip": ("app",)}, {"lock": "pylock.toml"}, {"apt": ("git",)}]
    for option in options:
        with pytest.raises(UsageError, match="is used unchanged: nothing is installed into it"):
            check(Image(python="/bin/python3", **option), "3.11")
    check(Image(lock="uv.lock", pip=("app",)), "3.11")
    with pytest.raises(UsageError, match=r"only fixes the versions of packages") as raised:
        check(Image(lock="uv.lock"), "3.11")
    assert "Image.of_project()" in str(raised.value.hint)
