"""Hosts for every test, pools over every transport, and the guard that nothing is read or left that should not be.

The lab is namespace hosts where the machine can have them; elsewhere sshd on loopback, and the summary says what that
left untested. In CI a missing lab is a failure. ``SKYFAB_TEST_LAB=loopback`` asks for the fallback.
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # else torch keeps a file open for a profiler, which looks like a leak

import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage import labs, traces
from stage.spot import Spot

import skyfab as sky
from skyfab.lab import Lab, root
from skyfab.ui.events import Event

TRANSPORTS = ("local", "fabric", "openssh")
USERS = {"fabric": "ada", "openssh": "root"}
"""Who logs in, so that the same suite runs as root and as an ordinary user."""

_LEFT_OUT = (
    *("SSH_AUTH_SOCK", "SSH_ASKPASS", "SKYFAB_INVENTORY", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"),
    "PYTHONUNBUFFERED",  # `local` inherits it, and would not buffer as hosts do
    "PYTHONDONTWRITEBYTECODE",  # every program and agent of the tests would compile skyfab anew
)

_home = pytest.StashKey[Path]()
_labs = pytest.StashKey[list[Lab]]()
_left_on_hosts = pytest.StashKey[set[str]]()


# ---- what a test may see of this machine


def pytest_configure(config: pytest.Config) -> None:
    """A home of the run's own, before anything looks for one: nothing of the user's is read or written.

    The ssh program goes by passwd and not by $HOME: its settings name this home too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: programs of ours would ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):  # in the background, and with nohup
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    home = Path(tempfile.mkdtemp(prefix="skyfab-home-"))
    config.stash[_home] = home
    config.stash[_labs] = []
    (home / ".ssh").mkdir(mode=0o700)
    key = home / ".ssh" / "id_ed25519"  # a key that no host knows, as people have them
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, stdin=subprocess.DEVNULL
    )
    (home / ".ssh" / "known_hosts").touch()
    settings = home / "ssh_config"
    settings.write_text(
        f"Host *\n  UserKnownHostsFile {home}/.ssh/known_hosts\n  GlobalKnownHostsFile none\n  IdentityFile {key}\n"
    )
    os.environ["HOME"] = str(home)
    os.environ["SKYFAB_SSH_CONFIG"] = str(settings)
    for name in _LEFT_OUT:
        os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="unit tests, and calls over one transport")


SLOW = 10.0
"""Seconds from which a test carries the marker `slow`."""
SLOW_FOLDERS = ("device", "faults", "fuzz", "gpu", "lab", "plugins")
"""Not in the fast tier, and not even imported for it: each needs a framework, or minutes."""
SLOW_MARKERS = ("slow", "soak", "torch", "programs")
SLOW_FIXTURES = {"lent_lab", "namespaces"}
"""What only tests have that take long."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    folder = collection_path.relative_to(Path(__file__).parent).parts[:1]
    return True if config.getoption("--fast") and folder and folder[0] in SLOW_FOLDERS else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that runs over each transport has one of them in the default tier, and all in the soak.

    The fast tier has no framework, no test that is marked as slow, no random data, no SSH and no programs.
    """
    over: dict[str, list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        transport = callspec and callspec.params.get("transport")
        if transport in TRANSPORTS:
            over.setdefault(item.nodeid.replace(transport, "*"), []).append(item)
    for name, same in over.items():
        chosen = [item for item in same if not config.getoption("--fast") or _is_fast(item)] or same
        one = chosen[zlib.crc32(name.encode()) % len(chosen)]
        for item in same:
            if item is not one:
                item.add_marker("soak")
    if config.getoption("--fast"):
        chosen = [item for item in items if _is_fast(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def _is_fast(item: Any) -> bool:
    if any(map(item.get_closest_marker, SLOW_MARKERS)) or getattr(item.obj, "is_hypothesis_test", False):
        return False
    fixtures = set(getattr(item, "fixturenames", ()))
    if SLOW_FIXTURES & fixtures:
        return False
    callspec = getattr(item, "callspec", None)
    is_local = callspec is not None and callspec.params.get("transport") == "local"
    return is_local or ("lab" not in fixtures and not item.get_closest_marker("lab"))


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_home], ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    passed: list[pytest.TestReport] = terminalreporter.getreports("passed")
    long = [one for one in passed if one.duration > SLOW and not {"slow", "soak"} & one.keywords.keys()]
    if long:
        terminalreporter.section(
            "longer than 10 s: needs the marker slow, or less work (a busy machine shows some too)"
        )
        for one in long:
            terminalreporter.write_line(f"{one.duration:.0f} s  {one.nodeid}")
    limits = {limit: None for lab in config.stash[_labs] for limit in lab.limits}
    if limits:
        terminalreporter.section("not tested on this machine")
        for limit in limits:
            terminalreporter.write_line(limit)


@pytest.fixture(scope="session")
def home(pytestconfig: pytest.Config) -> Path:
    """The home folder that this run believes to be the user's."""
    return pytestconfig.stash[_home]


# ---- hosts


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config) -> Iterator[Lab]:
    """Four hosts for the whole run, with the system's own Python and nothing else.

    A module that hosts import may import pytest and hypothesis, which are stand-ins there, and no other package.
    """
    yield from _started(pytestconfig, root.python_to_lend())


@pytest.fixture(scope="session")
def lent_lab(pytestconfig: pytest.Config) -> Iterator[Lab]:
    """Four hosts with the interpreter that runs the tests, for those that need its torch or numpy there.

    A module whose tests all do has a fixture `lab` that returns this one.
    """
    yield from _started(pytestconfig, sys.executable)


def _started(config: pytest.Config, python: str | None) -> Iterator[Lab]:
    kind: Any = os.environ.get("SKYFAB_TEST_LAB", "auto")
    lab = Lab.start(count=4, kind=kind, python=python)
    if lab.kind == "loopback" and python is None:  # such hosts have no Python of their own
        lab.stop()
        lab = Lab.start(count=4, kind=kind, python=sys.executable)
    with lab:
        if lab.kind != "namespace" and os.environ.get("CI"):
            pytest.fail(f"CI has no namespace hosts: {' '.join(lab.limits)}")
        labs.put_stand_ins(lab)
        config.stash[_labs].append(lab)
        yield lab


@pytest.fixture
def namespaces(lab: Lab) -> Lab:
    """The lab, where its hosts are real enough to be broken and looked into."""
    if lab.kind != "namespace":
        pytest.skip(lab.limits[0])
    return lab


@pytest.fixture(scope="module")
def hosts_of(lab: Lab, home: Path) -> Callable[..., list[sky.Host]]:
    """``hosts_of("fabric", count=2)``: hosts that are reached by that transport."""
    return _hosts_of(lab, home)


def _hosts_of(lab: Lab, home: Path) -> Callable[..., list[sky.Host]]:
    def hosts(transport: str, count: int = 2, *, user: str | None = None, **changes: Any) -> list[sky.Host]:
        if transport == "local":
            caches = [str(home / f"cache{number}") for number in range(1, count + 1)]
            return [
                sky.Host(**{"name": f"here{number}", "transport": "local", "cache": cache, **changes})
                for number, cache in enumerate(caches, 1)
            ]
        inventory = sky.Inventory.of(lab.inventory)
        if lab.kind == "namespace":
            changes["user"] = user or USERS[transport]
        return [replace(host, transport=transport, **changes) for host in list(inventory.hosts.values())[:count]]

    return hosts


@pytest.fixture(scope="module")
def lent_hosts_of(lent_lab: Lab, home: Path) -> Callable[..., list[sky.Host]]:
    """The same for hosts that have what this program can import."""
    return _hosts_of(lent_lab, home)


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport in turn: one suite runs over all of them."""
    return str(request.param)


@pytest.fixture(scope="module")
def pool(transport: str, hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    """Two hosts with a rank each, open for the whole module."""
    with sky.Compute(hosts_of(transport), ui="none") as compute:
        yield compute


@pytest.fixture(scope="module")
def lent_pool(transport: str, lent_hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    """The same on hosts that have what this program can import."""
    with sky.Compute(lent_hosts_of(transport), ui="none") as compute:
        yield compute


@pytest.fixture
def open_pool(hosts_of: Callable[..., list[sky.Host]]) -> Iterator[Callable[..., sky.Compute]]:
    """``open_pool("local", count=1, ranks=2)``: a pool of the test's own, closed after it."""
    with ExitStack() as stack:

        def open_it(transport: str = "local", count: int = 1, user: str | None = None, **options: Any) -> sky.Compute:
            hosts = hosts_of(transport, count, user=user, **options.pop("host", {}))
            return stack.enter_context(sky.Compute(hosts, **{"ui": "none", **options}))

        yield open_it


@pytest.fixture
def events(pool: sky.Compute) -> Iterator[list[Event]]:
    """What happens in the pool during the test."""
    found: list[Event] = []
    unsubscribe = pool.events.subscribe(found.append)
    yield found
    unsubscribe()


@pytest.fixture
def spot(lab: Lab) -> Iterator[Spot]:
    """A folder that functions and the test both see, whichever host they are on."""
    place = Spot(lab.hosts)
    yield place
    place.close()


@pytest.fixture
def runs_on(lab: Lab) -> Callable[[str, int], bool]:
    """``runs_on("node1", pid)``: whether a process with that number is alive there; other names are this machine."""

    def alive(host: str, pid: int) -> bool:
        names = {each.name: each for each in lab.hosts if each.kind == "namespace"}
        if host in names:
            return any(process.pid == pid for process in names[host].processes())
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return alive


# ---- nothing is left


@pytest.fixture(autouse=True)
def nothing_stays_in_this_process() -> Iterator[None]:
    """A test leaves no thread, file descriptor or child process of this program."""
    looks = (traces.threads, traces.descriptors, traces.children)
    before = {trace for look in looks for trace in look()}
    yield
    left = traces.left(looks, before)
    assert not left, f"left behind by this test: {sorted(left)}"


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_on_hosts(request: pytest.FixtureRequest, home: Path) -> Iterator[None]:
    """A module leaves no process and no run folder, on any host or on this machine."""
    yield
    up = [host for lab in request.config.stash[_labs] for host in lab.hosts if host.up]
    looks: list[Callable[[], set[str]]] = [lambda: traces.here(home)]
    looks += [lambda host=host: traces.on(host) for host in up]  # type: ignore[misc]
    looks += [lambda host=host: traces.folders(host) for host in up]  # type: ignore[misc]
    looks += [lambda: {str(path) for path in home.glob("**/run/*/*")}]
    known = request.config.stash.setdefault(_left_on_hosts, set())
    left = traces.left([lambda look=look: look() - known for look in looks])  # type: ignore[misc]
    known |= left  # the modules after it are not to blame
    assert not left, f"left behind by this module: {sorted(left)}"
