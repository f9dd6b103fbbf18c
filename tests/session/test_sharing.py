"""Sharing: users, pools and programs on one host at once, one cache for two hosts, and clocks that disagree.

The two hosts have a folder in common, as over NFS. Clocks are set apart by libfaketime (Debian: faketime) in the login
shell of a user, so that shells, agents and ranks of theirs all believe it; where it is missing, files alone are of
another time.
"""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage import labs, remote, traces
from stage.index import Index, isolate_uv
from stage.spot import Spot, until
from stage.threads import at_once

import skyfab as sky
from skyfab.env.gc import Swept, question
from skyfab.lab import Lab
from skyfab.session.ask import Asker

pytestmark = pytest.mark.lab

HOUR = 3600.0
LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
_caches = itertools.count(1)

where = sky.function(remote.where)
version_of = sky.function(remote.version_of)


@sky.function
def who(value: int = 0) -> tuple[int, str, int]:
    return os.getuid(), os.uname().nodename, value


now = sky.function(lambda: time.time())  # it travels by itself: environments have no pytest, and cannot import this


@sky.function
def leave_and_wait(name: str, go: str) -> str:
    remote.leave(name, "begun")
    remote.wait_for(go)
    return "done"


# ---- two hosts with a folder in common


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that both hosts see at the same path, as this machine does."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def pair(shared: Path) -> Iterator[Lab]:
    """Two hosts of these tests' own."""
    with labs.start_for_calls(2, lend=[str(shared)]) as lab:
        for host in lab.hosts:
            host.run(["mount", "-o", "remount,bind,rw", str(shared)])
        yield lab


@pytest.fixture
def common(shared: Path) -> str:
    """An empty cache folder that both hosts have."""
    return f"{shared}/cache{next(_caches)}"


@pytest.fixture
def hosts(pair: Lab) -> Callable[..., list[sky.Host]]:
    """``hosts(user="ada", cache=…)``: both of them."""

    def both(**changes: Any) -> list[sky.Host]:
        found = sky.Inventory.of(pair.inventory).hosts.values()
        return [replace(host, transport="openssh", **changes) for host in found]

    return both


@pytest.fixture
def rendezvous(pair: Lab) -> Iterator[Spot]:
    place = Spot(pair.hosts)
    yield place
    place.close()


@pytest.fixture(autouse=True)
def nothing_stays(pair: Lab, shared: Path) -> Iterator[None]:
    """After each test: no process on either host, and no run folder in any cache."""
    yield

    def folders() -> set[str]:
        homes = [host.path(home) for host in pair.hosts for home in ("/root", "/home", "/var/tmp")]
        return {str(path) for home in homes for path in home.glob("**/run/node?/*")} | {
            str(path) for path in shared.glob("*/run/*/*")
        }

    left = traces.left([lambda host=host: traces.on(host) for host in pair.hosts] + [folders])  # type: ignore[misc]
    assert not left, f"left behind: {sorted(left)}"


def pool(hosts: list[sky.Host], **options: Any) -> sky.Compute:
    return sky.Compute(hosts, **{"ui": "none", **options})


def gc(host: sky.Host, days: int) -> Swept:
    with Asker([host], sky.Inventory(hosts={})) as asker:
        return asker.ask_one(question(days), host)


def half_made(folder: Path) -> list[str]:
    """What was begun in a cache and not finished; locks are for ever."""
    kinds = ("envs", "packages", "bundles", "trees", "blobs", "pythons")
    names = [path for kind in kinds for path in (folder / kind).glob("*") if not path.name.startswith(".lock-")]
    return [str(path) for path in names if "." in path.name]


# ---- users, pools and programs on one host


@pytest.mark.slow
def test_two_users_with_two_pools_each_work_at_once_and_end_when_they_like(
    pair: Lab, hosts: Callable[..., list[sky.Host]], rendezvous: Spot
) -> None:
    """On a host that has seen none of them. Each is itself, and has a run folder of its own in a cache of its own."""
    users = {"root": "/root/.cache/skyfab", "ada": "/home/ada/.cache/skyfab"}
    for cache in users.values():
        pair.hosts[0].run(["rm", "-rf", cache])
    pools = [(user, pool(hosts(user=user)[:1], lease=600)) for user in (*users, *users)]
    try:
        at_once(lambda one: one[1].open(), pools)
        uids = {"root": 0, "ada": pair.hosts[0].path("/home/ada").stat().st_uid}

        def work(one: tuple[str, sky.Compute]) -> list[tuple[int, str, int]]:
            return [who(n) >> one[1] for n in range(20)] + who(99) @ one[1]

        for (user, _), found in zip(pools, at_once(work, pools), strict=True):
            assert found == [(uids[user], "node1", n) for n in (*range(20), 99)]
        for cache in users.values():
            assert len(list(pair.hosts[0].path(cache).glob("run/node1/*"))) == 2
        last = pools[3][1]
        future = leave_and_wait(rendezvous / "begun", rendezvous / "go") > last
        rendezvous.wait("begun")
        for _, one in pools[:3]:
            one.close()
        until(lambda: not list(pair.hosts[0].path(users["root"]).glob("run/node1/*")), "the end of root's pools")
        assert who(5) @ last == [(uids["ada"], "node1", 5)]
        rendezvous.leave("go")
        assert future.result(170) == "done"
    finally:
        for _, one in pools:
            one.close()


PARTS = 60
PROGRAM = f"""
import os, sys
from dataclasses import replace
import skyfab as sky

@sky.function
def read():
    import importlib, sys
    sizes = [len(importlib.import_module(f"shelf.part{{n}}").text) for n in range({PARTS})]
    return sys.prefix, sum(sizes)

user, cache = sys.argv[1:]
node = sky.Inventory.of(os.environ["SKYFAB_INVENTORY"]).hosts["node1"]
node = replace(node, user=user, cache=cache, python="auto", transport="openssh")
print("ready", flush=True)
sys.stdin.readline()
with sky.Compute([node], image=sky.Image(pip=["shelf"]), ui="none") as compute:
    print(*(read() >> compute), flush=True)
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A package in many files; nothing of this machine's settings and caches is seen."""
    isolate_uv(tmp_path, monkeypatch)
    with Index(tmp_path / "index") as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.url)
        files = {f"shelf/part{n}.py": f"text = {'x' * 1000!r}\n" for n in range(PARTS)}
        found.add("shelf", "1.0", files=files)
        yield found


@pytest.mark.slow
def test_programs_that_start_together_with_one_image_share_what_none_of_them_has(
    pair: Lab, index: Index, tmp_path: Path
) -> None:
    """Three processes, of two users there, with empty caches here and there: none fails, none uses half of anything."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    caches = {"root": "/var/tmp/sharing", "ada": "/home/ada/sharing"}
    env = {**os.environ, "SKYFAB_INVENTORY": str(pair.inventory)}
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), user, caches[user]],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for user in ("root", "root", "ada")
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        said = at_once(lambda program: program.communicate("go\n", timeout=170), programs, timeout=170)
        found = [(program.returncode, *out.split()) for program, (out, _) in zip(programs, said, strict=True)]
        assert [(code, size) for code, _, size in found] == [(0, str(1000 * PARTS))] * 3, [err for _, err in said]
        assert found[0] == found[1] and found[0][1].startswith(caches["root"])
        assert found[2][1].startswith(caches["ada"])
        for cache in map(pair.hosts[0].path, caches.values()):
            assert half_made(cache) == []
            assert len([path for path in (cache / "envs").iterdir() if not path.name.startswith(".")]) == 1
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.name.startswith((".new", ".in"))]
    finally:
        for program in programs:
            program.kill()
            program.communicate()
        for cache in caches.values():
            pair.hosts[0].run(["rm", "-rf", cache])


# ---- one cache for two hosts


@pytest.mark.slow
def test_hosts_with_one_cache_are_two_hosts(
    hosts: Callable[..., list[sky.Host]], common: str, index: Index, tmp_path: Path
) -> None:
    """All is made at once by both, in an empty folder: bundle, project, environment. Each is made whole, and once."""
    (tmp_path / "beside.py").write_text("answer = 42\n")

    @sky.function
    def look() -> tuple[str, str, int, int]:
        import importlib

        import beside  # type: ignore[import-not-found]

        sizes = [len(importlib.import_module(f"shelf.part{n}").text) for n in range(PARTS)]
        return os.uname().nodename, sys.prefix, beside.answer, sum(sizes)

    image = sky.Image(pip=["shelf"], includes=(str(tmp_path / "beside.py"),))
    with pool(hosts(cache=common, python="auto"), image=image) as compute:
        found = look() @ compute
        assert [one[0] for one in found] == ["node1", "node2"]
        assert {one[1:] for one in found} == {(found[0][1], 42, 1000 * PARTS)}
        assert found[0][1].startswith(common)
        runs = {path.parent.name for path in Path(common).glob("run/*/*")}
        assert runs == {"node1", "node2"}
    assert half_made(Path(common)) == []
    for kind in ("envs", "bundles"):
        assert len([path for path in Path(common, kind).iterdir() if not path.name.startswith(".")]) == 1


@pytest.mark.slow
def test_a_host_sweeps_its_own_run_folders_in_a_shared_cache_and_no_others(
    hosts: Callable[..., list[sky.Host]], common: str
) -> None:
    """Neither a new pool nor gc on one host touches what the other has: living or dead, of whatever age."""
    first, second = hosts(cache=common)
    with pool([second], lease=600) as living:
        assert who(1) >> living == (0, "node2", 1)
        (run,) = Path(common).glob("run/node2/*")
        dead = {name: Path(common, "run", name, f"{'d' * 16}-0") for name in ("node1", "node2")}
        for folder in dead.values():
            folder.mkdir(parents=True, mode=0o700)
        _age(Path(common), -40 * 24 * HOUR)
        with pool([first]) as other:
            assert who(2) >> other == (0, "node1", 2)
            assert not dead["node1"].exists(), "its own"
            gc(first, 0)
            assert run.is_dir() and dead["node2"].is_dir()
            assert who(3) @ living == [(0, "node2", 3)], "a new process finds all that it needs"
            assert who(4) @ other == [(0, "node1", 4)]
        gc(second, 0)
        assert run.is_dir() and not dead["node2"].exists()
        assert who(5) >> living == (0, "node2", 5)


MIDWAY = """n=0
until ls {cache}/envs/.in-*/bin/python || test $n = 100; do sleep 0.05; n=$((n+1)); done >/dev/null 2>&1
"""
"""Waits until the other host is in the middle of it, but not for ever."""
LOCKS = {
    "of each host's own": "exit 0",  # NFS with local_lock, Lustre with localflock
    "not at all": "echo 'flock: 9: Function not implemented' >&2; exit 1",  # Lustre as it comes
}


@pytest.mark.parametrize("locks", LOCKS)
@pytest.mark.slow
def test_a_shared_cache_without_locks_between_hosts_is_built_all_the_same(
    pair: Lab, hosts: Callable[..., list[sky.Host]], common: str, index: Index, locks: str
) -> None:
    """What one host is making is not the other's to clear away. Here it is the `flock` program that does as told."""
    for host in pair.hosts:
        late = MIDWAY.format(cache=common) if host.name == "node2" else ""
        host.path("/usr/local/bin/flock").write_text(f"#!/bin/sh\n{late}{LOCKS[locks]}\n")
        host.path("/usr/local/bin/flock").chmod(0o755)
    try:
        with pool(hosts(cache=common, python="auto"), image=sky.Image(pip=["shelf"])) as compute:
            assert version_of("shelf") @ compute == ["1.0"] * 2
    finally:
        for host in pair.hosts:
            host.path("/usr/local/bin/flock").unlink()
    assert half_made(Path(common)) == []


# ---- clocks


def _age(folder: Path, seconds: float) -> None:
    """Everything in it is of another time than now."""
    moment = time.time() + seconds
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (moment, moment), follow_symlinks=False)


@pytest.fixture
def clocks(pair: Lab) -> Iterator[Callable[..., None]]:
    """``clocks("+5h", "-5h")``: from now on those who log in as `timely` find that time on the two hosts.

    The files of a disk have the host's time too; with `server` they have that of whoever keeps them.
    """
    if LIBRARY is None:
        pytest.skip("no libfaketime here: apt-get install faketime")
    shell = "/usr/local/bin/timely"

    def wind(*offsets: str, server: bool = False) -> None:
        for host, offset in zip(pair.hosts, offsets, strict=True):
            words = {"LD_PRELOAD": str(LIBRARY), "FAKETIME": offset, "DONT_FAKE_MONOTONIC": "1"}
            words |= {"FAKETIME_DISABLE_SHM": "1"} | ({"NO_FAKE_STAT": "1"} if server else {})
            exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in words.items())
            host.path(shell).write_text(f'#!/bin/sh\nexport {exports}\nexec /bin/sh "$@"\n')
            host.path(shell).chmod(0o755)
            if "timely:" not in host.path("/etc/passwd").read_text():
                host.add_user("timely", shell=shell)

    yield wind
    for host in pair.hosts:
        host.run(["rm", "-rf", "/home/timely/.cache"])


def _hours(pool: sky.Compute) -> list[int]:
    """How far the clocks of its hosts are ahead of ours."""
    return [round((found - time.time()) / HOUR) for found in now() @ pool]


@pytest.mark.slow
def test_clocks_that_are_hours_apart_do_not_matter(
    pair: Lab, hosts: Callable[..., list[sky.Host]], clocks: Callable[..., None], index: Index
) -> None:
    """Pools open and work, environments are made and found again, and gc knows what is in use."""
    clocks("+5h", "-7h")
    both = hosts(user="timely", python="auto")
    image = sky.Image(pip=["shelf"])
    with pool(both, image=image, lease=600) as living:
        assert _hours(living) == [5, -7]
        assert version_of("shelf") @ living == ["1.0"] * 2
        future = living.submit(version_of("shelf"), on="node2")
        assert future.result(170) == "1.0"
        with pool(both, image=image) as other:
            assert where() @ other == where() @ living
            for host in both:
                assert "envs" not in gc(host, 0).counts
            assert _hours(other) == [5, -7]
    for there in pair.hosts:
        assert half_made(there.path("/home/timely/.cache/skyfab")) == []


def test_hosts_with_one_cache_may_disagree_about_the_time(
    pair: Lab, hosts: Callable[..., list[sky.Host]], clocks: Callable[..., None], shared: Path
) -> None:
    """Files have the server's time. A host that is days ahead sweeps, and the other's pool goes on."""
    clocks("+3d", "-5h", server=True)
    cache = f"{shared}/timely{next(_caches)}"
    owner = pair.hosts[0].path("/home/timely").stat().st_uid
    Path(cache).mkdir(mode=0o700)
    os.chown(cache, owner, owner)
    first, second = hosts(user="timely", cache=cache)
    with pool([first, second], lease=600) as living:
        assert _hours(living) == [72, -5]
        with pool([first]) as other:
            assert _hours(other) == [72]
            for host in (first, second):
                gc(host, 0)
            assert _hours(other) == [72]
        assert _hours(living) == [72, -5]
        assert {path.parent.name for path in Path(cache).glob("run/*/*")} == {"node1", "node2"}
