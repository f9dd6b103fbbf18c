"""gc: what is old and unused goes from a host's cache, and nothing else does, also while others look or work there."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from stage.threads import at_once

import skyfab as sky
from skyfab.cli.gc import gc
from skyfab.env.gc import Swept, question, sweep_here
from skyfab.errors import HostUnfit, PoolError, UsageError
from skyfab.host.ask import gc as host_gc
from skyfab.session.ask import Asker
from skyfab.session.bootstrap import open_shell
from skyfab.session.question import Reply
from skyfab.ssh import transport_for

HOSTILE = 'it\'s a "cache" $(x) *'
"""A folder's name that only quotes get through a shell."""
INVENTORY = sky.Inventory(hosts={})


def digest(letter: str) -> str:
    return letter * 64


OLD, YOUNG, NEW = digest("a"), digest("b"), digest("c")
OLD_ENV, YOUNG_ENV, NEW_ENV = "a" * 40, "b" * 40, "c" * 40
OLD_RUN, YOUNG_RUN, NEW_RUN = (f"{letter * 16}-0" for letter in "abc")

FILL = f"""
mkdir -p "$c" && cd "$c" && mkdir envs packages bundles trees blobs logs pythons || exit 1
age() {{ n=$1; shift; find "$@" -exec touch -c -h -d "$n" {{}} + || :; }}
for f in packages bundles trees pythons; do
  for d in {OLD} {YOUNG} {NEW}; do mkdir "$f/$d" && echo content >"$f/$d/file"; done
done
for d in {OLD} {YOUNG} {NEW}; do echo content >"blobs/$d"; done
for d in {OLD_ENV} {YOUNG_ENV} {NEW_ENV}; do mkdir -p "envs/$d/bin"; : >"envs/$d/.used"; : >"envs/.lock-$d"; done
for d in {OLD_RUN} {YOUNG_RUN} {NEW_RUN}; do mkdir "logs/$d"; echo line >"logs/$d/0.out"; done
age '40 days ago' */{"a" * 16}* envs/.lock*
age '2 days ago' */{"b" * 16}*
"""
"""Of everything something old, something of two days ago, and something new."""

LIST = """cd "$c" 2>/dev/null &&
find . ! -name . ! -name file ! -name 0.out ! -name bin ! -name .used ! -path "*[0-9][0-9a-f]*" | sort"""
"""Without the bundle that answers, whose digest has digits."""


def expected(*letters: str) -> list[str]:
    """What FILL makes and gc leaves."""
    kinds = ("blobs", "bundles", "packages", "pythons", "trees")
    found = [f"./{kind}" for kind in (*kinds, "envs", "logs")]
    for letter in letters:
        found += [f"./{kind}/{digest(letter)}" for kind in kinds]
        found += [f"./envs/{letter * 40}", f"./logs/{letter * 16}-0", f"./envs/.lock-{letter * 40}"]
    return sorted(found)


class Cache:
    """The cache folder of a host, seen by a shell there."""

    def __init__(self, host: sky.Host) -> None:
        self.host = host

    def __call__(self, text: str) -> list[str]:
        with open_shell(self.host, transport_for(self.host, INVENTORY)) as shell:
            return shell.run(text).splitlines()

    def gc(self, days: int = 30, *, dry_run: bool = False) -> Swept:
        asked = question(days, dry_run=dry_run)
        if self.host.transport == "local":
            return asked.parse(self.host, iter([Reply(host_gc.gc(self.host.cache, **asked.arguments), b"")]))
        with Asker([self.host], INVENTORY) as asker:
            return asker.ask_one(asked, self.host)


@pytest.fixture
def cache_on(hosts_of: Callable[..., list[sky.Host]], home: Path) -> Iterator[Callable[..., Cache]]:
    """``cache_on("fabric")``: an empty cache folder with a hostile name on a host, removed after the test."""
    made: list[Cache] = []

    def make(transport: str = "local", **changes: str) -> Cache:
        base = str(home) if transport == "local" else "~"
        (host,) = hosts_of(transport, 1, **{"cache": f"{base}/gc/{HOSTILE}", **changes})
        made.append(Cache(host))
        return made[-1]

    yield make
    for cache in made:
        cache('rm -rf "$c"/../../gc')


@pytest.fixture
def cache(cache_on: Callable[..., Cache]) -> Cache:
    return cache_on()


# ---- ages


@pytest.mark.lab
@pytest.mark.parametrize("transport", ["local", "fabric", "openssh"])
def test_what_is_old_goes_and_nothing_else(cache_on: Callable[..., Cache], transport: str) -> None:
    """Over every transport, as root and as an ordinary user."""
    cache = cache_on(transport)
    cache(FILL)
    swept = cache.gc()
    assert cache(LIST) == expected("b", "c")
    assert swept.counts == {"envs": 1, "pythons": 1, "packages": 1, "bundles": 1, "trees": 1, "blobs": 1, "logs": 1}
    assert str(swept).startswith("removed 1 environment, 1 Python, 1 package, ") and str(swept).endswith(" kB")
    assert str(cache.gc()) == "nothing to remove"
    assert cache(LIST) == expected("b", "c")


def test_a_dry_run_says_what_would_go_and_changes_nothing(cache: Cache) -> None:
    """Nothing is written either: what is found by a look stays as old as it was."""
    cache(FILL + "mkdir -p files/old-0a1b2c3d; echo content >files/old-0a1b2c3d/x; age '40 days ago' files")
    times = 'cd "$c" && find . -exec stat -c "%n %Y" {} +'
    before = sorted(cache(times))
    swept = cache.gc(dry_run=True)
    assert sorted(cache(times)) == before
    assert str(swept).startswith("would remove 1 environment, 1 Python, 1 package, ")
    assert [name for name, _ in swept.folders] == ["old-0a1b2c3d"]
    assert cache.gc().counts == swept.counts


def test_an_environment_is_as_old_as_its_last_use_and_a_log_as_its_last_line(cache: Cache) -> None:
    used = f": >envs/{OLD_ENV}/.used; touch -d '40 days ago' envs/{YOUNG_ENV}/.used"
    cache(f"{FILL}{used}; echo more >>logs/{OLD_RUN}/0.out")
    cache.gc()
    assert cache('ls "$c/envs"') == [OLD_ENV, NEW_ENV]
    assert OLD_RUN in cache('ls "$c/logs"')


def test_working_folders_go_when_nothing_in_them_was_used_and_are_named(cache: Cache) -> None:
    """One with a file of yesterday stays, and so does one that a living pool uses."""
    names = ("old-0a1b2c3d", "young-0a1b2c3d", "used-0a1b2c3d", ".hidden")
    cache(
        FILL
        + "".join(f"mkdir -p files/{name}/deep; head -c 3000000 /dev/zero >files/{name}/deep/x; " for name in names)
        + "touch files/.copied-old-0a1b2c3d files/.copied-young-0a1b2c3d; "
        + "age '40 days ago' files; touch -d '1 day ago' files/young-0a1b2c3d/deep/x; "
        + f'mkdir -p "run/$(uname -n)/{NEW_RUN}"; echo used-0a1b2c3d >"run/$(uname -n)/{NEW_RUN}/files"'
    )
    swept = cache.gc()
    assert swept.counts["files"] == 1
    assert "1 working folder" in str(swept)
    assert "(old-0a1b2c3d 3.1 MB)" in str(swept) or "(old-0a1b2c3d 3.0 MB)" in str(swept)
    assert cache('ls -A "$c/files"') == [
        ".copied-young-0a1b2c3d",
        ".hidden",
        "used-0a1b2c3d",
        "young-0a1b2c3d",
    ]


def test_a_model_goes_when_it_was_not_read_and_what_it_shares_counts_once(cache: Cache) -> None:
    blob = "hub/models--org--{}/blobs"
    cache(
        FILL
        + "mkdir -p fetched; head -c 3000000 /dev/zero >fetched/old.bin; "
        + "".join(
            f"mkdir -p {(own := blob.format(name))}; head -c 3000000 /dev/zero >{own}/x; "
            f"ln -s blobs/x {own}/../link; ln {own}/x blobs/{digest(letter)}; "
            for name, letter in (("old", "d"), ("read", "e"))
        )
        + "age '40 days ago' hub fetched blobs/dd* blobs/ee*; touch -a -d '1 day ago' hub/models--org--read/blobs/x"
    )
    would_go = cache.gc(dry_run=True)
    swept = cache.gc()
    assert would_go.counts == swept.counts
    assert (swept.counts["hub"], swept.counts["fetched"], swept.counts["blobs"]) == (1, 1, 3)
    assert 6_000_000 < would_go.size < 6_500_000, "not the model that stays, although its other name goes"
    assert 6_000_000 < swept.size < 6_500_000
    assert cache('cd "$c"; ls hub fetched') == ["fetched:", "", "hub:", "models--org--read"]


def test_models_stay_where_the_disk_does_not_note_when_they_are_read(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are read daily would look as old as others. With --days=0 they go."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOATIME))
    cache(
        'mkdir -p "$c/hub/models--org--m" "$c/fetched" "$c/compiled/' + OLD + '"; : >"$c/fetched/file"\n'
        "find \"$c\" -exec touch -d '40 days ago' {} +"
    )
    swept = cache.gc()
    assert swept.counts == {} and cache('ls "$c"/hub "$c"/fetched "$c"/compiled | grep -c .') == ["6"]
    assert str(swept).startswith("nothing to remove; models and kernels stay: the disk does not record")
    assert cache.gc(0).counts == {"hub": 1, "fetched": 1, "compiled": 1}
    assert str(cache.gc()) == "nothing to remove"


def test_half_made_things_go_after_a_day(cache: Cache) -> None:
    drafts = [
        f"envs/.in-{'d' * 40}-s1",
        "packages/.in-s1",
        f"pythons/.in-{OLD}-77",
        f"bundles/{OLD}.{'d' * 16}-0",
        f"trees/.{'d' * 16}-x_y1",
        f"blobs/.{'d' * 16}-x_y1",
        "envs/.in-gc-0123456789abcdef",
        ".in-gc-0123456789abcdef",
        "ssh-0123456789abcdef",
    ]
    fresh = [f"{draft[:-1]}z" for draft in drafts[:6]]
    cache(FILL + "\n".join(f'mkdir -p "{d}"; : >"{d}/file"; touch -d "25 hours ago" "{d}"' for d in drafts))
    cache('cd "$c"; ' + "; ".join(f'mkdir "{d}"; touch -d "23 hours ago" "{d}"' for d in fresh))
    swept = cache.gc()
    assert swept.counts["drafts"] == len(drafts)
    assert cache(LIST) == sorted([*expected("b", "c"), *(f"./{draft}" for draft in fresh)])


def test_an_interpreter_stays_while_an_environment_is_made_from_it(cache: Cache) -> None:
    cache(
        FILL + f'echo "home = $c/pythons/{OLD}/python/bin" >envs/{NEW_ENV}/pyvenv.cfg\n'
        f"mkdir -p pythons/uv/cpython; age '40 days ago' pythons/uv"
    )
    cache.gc()
    assert cache('ls "$c/pythons"') == [OLD, YOUNG, NEW]
    cache(f'rm "$c/envs/{NEW_ENV}/pyvenv.cfg"')
    cache.gc()
    assert cache('ls "$c/pythons"') == [YOUNG, NEW]


# ---- nothing else


def test_links_are_removed_and_never_followed(cache: Cache) -> None:
    outside = '"$c"/../outside'
    cache(f'mkdir -p {outside}/bin && : >{outside}/{OLD} && : >{outside}/.used && touch -d "40 days ago" {outside}/*')
    kinds = {"packages": OLD, "bundles": OLD, "trees": OLD, "blobs": OLD, "pythons": OLD, "envs": OLD_ENV}
    links = "".join(f"rm -rf {kind}/{name}; ln -s ../../outside {kind}/{name}; " for kind, name in kinds.items())
    inner = f"ln -s ../../../outside trees/{YOUNG}/link; age '40 days ago' trees/{YOUNG}"
    cache(f"{FILL}{links} age '40 days ago' */{'a' * 16}*; {inner}")
    before = cache(f"find {outside} -exec ls -ld --time-style=full-iso {{}} +")
    swept = cache.gc()
    assert swept.counts["trees"] == 2 and swept.counts["envs"] == 1
    assert cache(LIST) == [line for line in expected("b", "c") if line != f"./trees/{YOUNG}"]
    assert cache(f"find {outside} -exec ls -ld --time-style=full-iso {{}} +") == before


def test_a_folder_of_the_cache_that_is_a_link_is_left_alone(cache: Cache) -> None:
    cache(
        FILL
        + 'mv blobs ../outside && ln -s ../outside blobs && mkdir ../run && ln -s ../run run && mkdir "run/$(uname -n)"'
    )
    cache(f'd="$c/run/$(uname -n)/{OLD_RUN}"; mkdir "$d"; touch -d "40 days ago" "$d"')
    cache.gc()
    assert cache('ls "$c/../outside"') == [OLD, YOUNG, NEW]
    assert cache('ls "$c/run/$(uname -n)"') == [OLD_RUN]


def test_what_has_a_name_that_is_not_ours_stays(cache: Cache) -> None:
    """The cache folder may be somebody's home."""
    names = [
        "logs/letters",
        "packages/my stuff",
        f"blobs/{OLD}.txt",
        "trees/a\\nb",
        "envs/mine",
        "uv.toml",
        "pythons/3.11",
    ]
    cache(FILL + "\n".join(f'mkdir "$(printf "{name}")"' for name in names) + "\nage '40 days ago' */[!b-c]* uv.toml")
    cache.gc()
    assert (
        len(cache('cd "$c"; ls -d logs/letters packages/my* blobs/*.txt trees/a?b envs/mine uv.toml pythons/3*')) == 8
    )


# ---- what is in use


def test_what_a_living_pool_uses_stays(cache: Cache, tmp_path: Path) -> None:
    """However old it all looks. Afterwards it is as old as it is."""
    (where,) = cache('mkdir -p "$c/envs" && cd "$c" && pwd')
    env = Path(where, "envs", OLD_ENV)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    (tmp_path / "beside.py").write_text("answer = 42\n")
    ages = 't=$(date -d "40 days ago" +%Y-%m-%dT%H:%M:%S); find "$c" -exec touch -h -d "$t" {} +'

    def look() -> tuple[str, int]:
        import sys

        import beside  # type: ignore[import-not-found]

        return sys.prefix, beside.answer

    image = sky.Image(python=str(env / "bin" / "python"), includes=(str(tmp_path / "beside.py"),))
    with sky.Compute([cache.host], image=image, ui="none") as pool:
        call = sky.function(look)()
        assert pool.run(call) == (str(env), 42)
        (run,) = Path(where).glob("run/*/*")
        assert (run / "env").read_text() == f"{OLD_ENV}\n"
        cache(f'mkdir "$c/envs/{YOUNG_ENV}" "$c/bundles/{OLD}"')
        cache(ages)
        swept = cache.gc(0)
        assert swept.counts == {"envs": 1, "bundles": 1}
        assert run.is_dir() and (Path(where) / "logs" / run.name).is_dir()
        assert pool.broadcast(call) == [(str(env), 42)], "a new process finds all of it"
    assert env.is_dir()
    cache(ages)
    cache.gc(0)
    assert cache('cd "$c"; find . -type f') == []


def test_a_pool_that_has_not_said_what_it_uses_may_use_anything(cache: Cache) -> None:
    cache(FILL + f"mkdir -p run/elsewhere/{OLD_RUN}; age '40 days ago' run")
    swept = cache.gc()
    assert swept.counts == {"packages": 1, "pythons": 1}
    assert cache('ls "$c/logs" "$c/run/elsewhere"').count(OLD_RUN) == 2


def test_run_folders_of_agents_that_are_gone_go(cache: Cache) -> None:
    """Those of this host, after a day; what another host has in a shared folder is its own business."""
    cache(
        FILL
        + f'h=run/$(uname -n); mkdir -p "$h/{OLD_RUN}/blobs" "$h/{YOUNG_RUN}" "$h/{NEW_RUN}" run/elsewhere/{OLD_RUN}\n'
        f"echo {OLD} >run/elsewhere/{OLD_RUN}/bundle\n"
        f'age "25 hours ago" "$h/{OLD_RUN}" run/elsewhere; age "23 hours ago" "$h/{YOUNG_RUN}"'
    )
    assert cache.gc().counts["run"] == 1
    assert cache('cd "$c/run"; ls "$(uname -n)"; ls elsewhere') == [YOUNG_RUN, NEW_RUN, OLD_RUN]


def test_an_agent_that_answers_is_alive_wherever_its_process_is(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may share a host's name and folders, and see none of each other's processes."""
    (where,) = cache(f'd="$c/run/$(uname -n)/{OLD_RUN}"; mkdir -p "$d" && cd "$d" && echo >bundle && pwd')
    with socket.socket(socket.AF_UNIX) as agent:
        monkeypatch.chdir(where)  # a socket's path is short
        agent.bind("agent.sock")
        monkeypatch.undo()
        agent.listen()
        cache('touch -d "40 days ago" "$c"/run/*/*')
        cache.gc()
        assert Path(where).is_dir()
    cache.gc()
    assert not Path(where).exists()


def test_runs_stay_while_they_go_on_and_until_they_are_fetched(cache: Cache, tmp_path: Path) -> None:
    """One that was fetched goes after a day, another when it is old; one whose agent lives stays, however old."""
    fetched, just_fetched, old, young, alive, rebooted = (letter * 16 for letter in "abcdef")
    cache(
        f"""
        mkdir -p "$c/runs" && cd "$c/runs" || exit 1
        for d in {fetched} {just_fetched} {old} {young} {alive} {rebooted}; do mkdir $d; echo 1 >$d/status; done
        boot=$(cat /proc/sys/kernel/random/boot_id)
        for d in {fetched} {just_fetched} {old} {young}; do echo "4194304 $boot /nowhere" >$d/agent; done
        echo "$$ $boot $(readlink /proc/$$/cwd)" >{alive}/agent
        echo "$$ another-boot $(readlink /proc/$$/cwd)" >{rebooted}/agent
        : >{fetched}/fetched; : >{just_fetched}/fetched
        find . -exec touch -d '40 days ago' {{}} +
        touch {just_fetched}/fetched {young}/status
        """
    )
    # The shell that wrote its number down has ended: another process stands for the agent that lives.
    with subprocess.Popen(["sleep", "100"], cwd=tmp_path) as agent:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        Path(cache.host.cache, "runs", alive, "agent").write_text(f"{agent.pid} {boot} {tmp_path}\n")
        swept = cache.gc()
        agent.kill()
    assert swept.counts.get("runs") == 3
    assert cache('ls "$c/runs"') == [just_fetched, young, alive]


def test_a_run_stays_while_another_host_with_the_same_cache_runs_it(cache: Cache) -> None:
    """Only that host removes its run folder. A log that is written keeps a run too."""
    alive, quiet, writes = (letter * 16 for letter in "abc")
    cache(
        f"""
        mkdir -p "$c/runs" "$c/run/elsewhere/{NEW_RUN}" && cd "$c/runs" || exit 1
        for d in {alive} {quiet} {writes}; do mkdir -p $d/logs; echo 1 | tee $d/status >$d/logs/0.out; done
        for d in {quiet} {writes}; do echo "1 another-boot $c/run/elsewhere/{OLD_RUN}" >$d/agent; done
        echo "1 another-boot /mnt/home/run/elsewhere/{NEW_RUN}" >{alive}/agent
        find . -exec touch -d '40 days ago' {{}} +
        touch {writes}/logs/0.out
        """
    )
    assert cache.gc().counts["runs"] == 1
    assert cache('ls "$c/runs"') == [alive, writes]


def test_lock_files_stay_with_their_environments(cache: Cache) -> None:
    gone, made = "d" * 40, "e" * 40
    cache(
        FILL + f': >envs/.lock-{gone}; : >envs/.lock-{made}; mkdir envs/.in-{made}-s1; age "2 hours ago" envs/.lock-*'
    )
    cache.gc()
    assert cache('ls -A "$c/envs"') == sorted(
        [*(f".lock-{env}" for env in (YOUNG_ENV, NEW_ENV, made)), f".in-{made}-s1", YOUNG_ENV, NEW_ENV]
    )


def test_two_at_once_share_the_work(cache: Cache) -> None:
    names = " ".join(f"{number:064x}" for number in range(300))
    cache(FILL + f"for d in {names}; do echo x >blobs/$d; done; age '40 days ago' blobs/0*")
    swept = at_once(lambda _: cache.gc(), range(3))
    assert sum(one.counts.get("blobs", 0) for one in swept) == 301
    assert sum(one.counts.get("envs", 0) for one in swept) == 1
    assert cache(LIST) == expected("b", "c")


# ---- at the same moment


def test_what_is_used_at_the_last_moment_comes_back(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool starts between the look and the deletion."""
    cache(FILL)
    real = os.rename

    def use(source: str, target: str) -> None:
        if Path(source, "bin").is_dir():
            Path(source, ".used").touch()
        elif Path(source).is_file():
            os.utime(source)
        real(source, target)

    monkeypatch.setattr(os, "rename", use)
    found = host_gc.gc(cache.host.cache, days=30, dry_run=False)
    assert "blobs" not in found["removed"] and "envs" not in found["removed"]
    assert cache('ls "$c/envs" "$c/blobs"').count(OLD_ENV) == 1
    assert OLD in cache('ls "$c/blobs"') and OLD not in cache('ls "$c/trees"')


def test_a_full_disk_is_cleaned(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room to move anything aside."""
    cache(FILL)

    def mkdir(path: str, *arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with monkeypatch.context() as full:
        full.setattr(os, "mkdir", mkdir)
        found = host_gc.gc(cache.host.cache, days=30, dry_run=False)
    assert found["removed"]["trees"][0] == 1 and not found["left"]
    assert cache(LIST) == expected("b", "c")


# ---- uv's own cache


def test_uvs_cache_goes_with_the_last_environment(cache: Cache) -> None:
    cache(
        FILL
        + f"mkdir -p uv/archive-v0; head -c 3000000 /dev/zero >uv/archive-v0/f; ln uv/archive-v0/f envs/{OLD_ENV}/f"
    )
    cache(f'cd "$c"; rm -rf envs/{YOUNG_ENV} envs/{NEW_ENV} envs/.lock*; touch -d "40 days ago" envs/a*')
    swept = cache.gc()
    assert swept.counts["envs"] == 1 and swept.size < 1e6, "a file with another name takes as much room as before"
    cache('find "$c/uv" -exec touch -d "2 hours ago" {} +')
    assert str(cache.gc()) == "removed unused files of uv: 3.0 MB"
    assert cache('ls -d "$c/uv" 2>/dev/null; true') == []


# ---- this machine


def test_here_goes_what_was_not_read_lately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = tmp_path / "skyfab"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    made = {}
    for letter, age in (("a", 40), ("b", 2)):
        names = (
            f"blobs/{digest(letter)}",
            f"wheels/{digest(letter)}/x.whl",
            f"locks/{letter}.toml",
            f"tools/uv-{letter}/uv",
            f"hosts/{letter}.json",
        )
        for name in (*names, f"busy/{letter}", f"pythons/cpython-{letter}/x.tar.gz", f"pythons/{digest(letter)}/file"):
            made[own / name] = age
    made[own / "wheels" / digest("d") / ".x.whl.part"] = 2
    made[own / "locks" / ".new-1"] = 2
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
    (own / "tools" / "link").symlink_to(outside)
    now = time.time()
    for path, days in made.items():
        for one in (path, path.parent):
            os.utime(one, (now - 86400 * days,) * 2)
    os.utime(own / "tools" / "link", (0, 0), follow_symlinks=False)
    os.utime(own / "locks" / "a.toml", (now, now - 86400 * 40))
    would_go = sweep_here(30, dry_run=True)
    assert all(os.path.lexists(path) for path in made)
    swept = sweep_here(30)
    assert (
        swept.counts == would_go.counts == {"wheels": 1, "drafts": 1, "tools": 2, "pythons": 1, "hosts": 1, "blobs": 1}
    )
    left = {path for path in made if path.exists()}
    kept = {path for path, days in made.items() if days == 2} | {own / "locks/a.toml", own / f"pythons/{OLD}/file"}
    assert left == kept - {own / "locks" / ".new-1"}
    assert (outside / "file").exists() and not (own / "tools" / "link").is_symlink()
    assert str(sweep_here(30)) == "nothing to remove"


# ---- what is said


def report(**changes: object) -> dict[str, object]:
    """What a host says of its cache."""
    return {"removed": {}, "folders": [], "left": "", "kept_uv": False, "kept_models": False, **changes}


def asked(said: object, **options: bool) -> Swept:
    return question(30, **options).parse(sky.Host(name="node1"), iter([Reply(said, b"")]))


def test_what_was_removed_is_said() -> None:
    removed = {"envs": [2, 5000], "files": [1, 3000], "locks": [0, 0], "unknown": [9, 9], "blobs": [1, -50]}
    swept = asked(report(removed=removed, folders=[["x" * 200, 3000]]))
    said = f"2 environments, 1 working folder, 1 file: 8.0 kB ({'x' * 100} 3.0 kB)"
    assert str(swept) == f"removed {said}"
    kept = "removed 1 environment: 1.0 kB; uv's cache still has the files, which environments share"
    assert str(asked(report(removed={"envs": [1, 1000]}, kept_uv=True))) == kept


def test_what_could_not_be_removed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = report(removed={"envs": [1, 1000]}, left="x" * 300 + "/c: Permission denied" + "y" * 379)
    left = "removed 1 environment: 1.0 kB; cannot remove some of its cache: /c: Permission denied" + "y" * 379
    with pytest.raises(HostUnfit) as raised:
        asked(said)
    assert (raised.value.message, raised.value.host, raised.value.hint) == (left, "node1", "remove it as its owner")
    monkeypatch.setattr("skyfab.env.gc.gc_here", lambda cache, **options: said)
    with pytest.raises(UsageError) as here:
        sweep_here(30)
    assert here.value.message == left


# ---- several hosts


@pytest.mark.lab
def test_a_host_that_is_down_does_not_keep_the_others(
    cache_on: Callable[..., Cache], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = cache_on(cache=f"{tmp_path}/gc/cache")
    cache(FILL)
    file = tmp_path / "inventory.toml"
    here = f'[hosts.here]\ntransport = "local"\ncache = "{tmp_path}/gc/cache"\n'
    dead = "".join(f'[hosts.dead{n}]\naddress = "127.0.0.1"\nport = {n}\n' for n in (1, 2))
    file.write_text(dead + here)
    with pytest.raises(PoolError) as failed:
        gc.function(inventory=str(file))
    assert [error.host for error in failed.value.exceptions] == ["dead1", "dead2"]  # type: ignore[union-attr]
    assert capsys.readouterr().out.startswith("here: removed 1 environment, ")
    assert cache(LIST) == expected("b", "c")


def test_names_of_a_hostile_host_do_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said: dict[str, object] = {"removed": {"files": [1, 5]}, "folders": [["\x1b[2Jjob\u202e", 5]], "left": ""}
    said |= {"kept_uv": False, "kept_models": False}
    monkeypatch.setattr(Asker, "ask_one", lambda _, asked, host: asked.parse(host, iter([Reply(said, b"")])))
    (tmp_path / "inventory.toml").write_text("[hosts.node1]\n")
    gc.function("node1", str(tmp_path / "inventory.toml"))
    assert capsys.readouterr().out == "node1: removed 1 working folder: 5 bytes (job 5 bytes)\n"
