"""Files: what functions write stays, where relative paths lead, and what was included lies there."""

from __future__ import annotations

import fcntl
import os
import resource
import shlex
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from stage.projects import inventory, skyfab
from stage.spot import until

import skyfab as sky
from skyfab.detached.find import attach
from skyfab.detached.written import project
from skyfab.env import gc
from skyfab.errors import ProtocolError
from skyfab.host.agent import workdir as agent_workdir
from skyfab.lab import Lab
from skyfab.pool.workdir import Workdir, Workdirs
from skyfab.session.ask import Asker
from skyfab.ui.events import Event, FilesWritten, Output

SAVES = """
import os
from pathlib import Path

before = Path("ckpt.pt").read_text() if Path("ckpt.pt").exists() else ""
print("before:", before or "nothing")
if os.environ["RANK"] == "0":
    Path("ckpt.pt").write_text(before + "x")
"""


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return str(Path.cwd())


def read(name: str) -> str:
    return Path(name).read_text()


def here() -> str:
    return str(Path.cwd())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder, which is the current one."""
    made = tmp_path / "my project"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def remote(hosts_of: Callable[..., list[sky.Host]]) -> list[sky.Host]:
    return hosts_of("openssh", 2)


# ---- two at once


def add(name: str, text: str) -> str:
    """Writes to the file in place."""
    with Path(name).open("a") as file:
        file.write(text)
    return str(Path.cwd())


def prepare() -> str:
    for name in ("log", "unchanged", "deep/er", "fixed"):
        write(name, "1")
    Path("fixed").chmod(0o444)
    Path("link").symlink_to("log")
    return str(Path.cwd())


def look() -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(Path().rglob("*")) if path.is_file()}


def test_a_pool_beside_another_one_has_a_folder_of_its_own(folder: Path, remote: list[sky.Host]) -> None:
    events: list[Event] = []
    (folder / "sent").write_text("sent")
    with sky.Compute(remote[:1], ui="none") as first:
        place = sky.function(prepare)() >> first
        with sky.Compute(remote[:1], ui="none") as second:
            second.events.subscribe(events.append)
            second.upload("sent")
            own = sky.function(add)("log", "2") >> second
            assert own.startswith(f"{place}.")
            assert sky.function(add)("link", "3") @ second == [own], "all of its processes work there"
            sky.function(add)("fixed", "2") >> second  # as root
            kept = {"deep/er": "1", "fixed": "12", "unchanged": "1"}
            assert sky.function(look)() >> second == {**kept, "log": "123", "link": "123", "sent": "sent"}
            second.download("log")
            assert (folder / "log").read_text() == "123"
            sky.function(write)("new", "x") >> second
        assert sky.function(look)() >> first == {**kept, "fixed": "1", "log": "1", "link": "1"}
        assert sky.function(here)() >> first == place
    (line,) = [event.text for event in events if isinstance(event, Output)]
    assert line == "another run uses the folder of this project: this one works in a copy"
    (files,) = [event for event in events if isinstance(event, FilesWritten)]
    assert (files.path, files.what) == (own.replace("/root", "~"), "2 files (3 bytes): new, fixed")
    with sky.Compute(remote[:1], ui="none") as third:
        assert sky.function(here)() >> third == place, "one after another they find what the last one left"
        assert "new" not in sky.function(look)() >> third


def test_runs_at_once_have_folders_of_their_own(folder: Path, remote: list[sky.Host]) -> None:
    def waits(name: str) -> str:
        write(name, name)
        while not Path("end").exists():
            time.sleep(0.05)
        return str(Path.cwd())

    with sky.Compute(remote[:1], ui="none") as pool:
        place = sky.function(write)("end", "") >> pool
        sky.function(os.unlink)("end") >> pool
        first = pool.launch(sky.function(waits)("first"))
        second = pool.launch(sky.function(waits)("second"), on="node1")
        own = f"{place}.{second.id[:8]}"
        assert sky.function(write)("end", "") >> pool == place, "a run works where the pool does that launched it"
        assert first.result(60) == [place]
        sky.function(write)(f"{own}/end", "") >> pool
        assert second.result(60) == own
    assert first.parts[0].about.workdir == project(str(folder))
    assert second.parts[0].about.workdir == Path(own).name
    (files,) = attach(second.id, remote[:1]).files()
    assert files.path.endswith(Path(own).name)
    assert "second" in files.what
    assert "first" not in files.what


def test_a_copy_that_fails_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    """The other run needs it."""
    write(str(tmp_path / "p/small"), "1")
    (tmp_path / "p/zlarge").write_bytes(bytes(100_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            agent_workdir.enter(str(tmp_path / "p.own"), str(tmp_path), "", str(tmp_path / "p"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["p"]


def test_gc_leaves_a_folder_that_is_being_copied(folder: Path, remote: list[sky.Host], namespaces: Lab) -> None:
    """Also if the run that used it ends meanwhile, and nothing in it has changed for long."""
    with sky.Compute(remote[:1], ui="none") as second, sky.Compute(remote[:1], ui="none") as first:
        place = sky.function(write)("deep/data", "x") >> first
        origin = namespaces.hosts[0].path(place)
        own = agent_workdir.own_name(origin.name, second.hosts[0].owner)
        with (origin.parent / f".in-{own}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the copy waits for it
            found = sky.function(look)() > second
            notes = origin.parents[1] / "run"
            until(
                lambda: any(own in note.read_text() for note in notes.glob("*/*/files")), "the copy is about to begin"
            )
            first.close()
            for path in (origin, *origin.rglob("*")):
                os.utime(path, (0, 0))
            with Asker(remote[:1], second.inventory) as asker:
                asker.ask_one(gc.question(0, dry_run=False), remote[0])
        assert found.result(60) == {"deep/data": "x"}


# ---- where


def test_on_this_machine_files_lie_in_the_callers_folder(folder: Path, open_pool: Callable[..., sky.Compute]) -> None:
    """As with torchrun."""
    place = sky.function(write)("ckpt.pt", "x") >> open_pool()
    assert place == str(folder)
    assert (folder / "ckpt.pt").read_text() == "x"


def test_a_second_pool_finds_on_the_host_what_the_first_has_written(folder: Path, remote: list[sky.Host]) -> None:
    with sky.Compute(remote[:1], ui="none") as compute:
        place = sky.function(write)("out/ckpt.pt", "x") >> compute
    assert place.endswith(f"{remote[0].cache.removeprefix('~')}/files/{project(str(folder))}")
    with sky.Compute(remote[:1], ui="none") as compute:
        assert sky.function(read)("out/ckpt.pt") >> compute == "x"
        assert sky.function(read)("out/ckpt.pt") @ compute == ["x"]


def test_another_folder_here_is_another_one_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine and user; names are readable, and safe in a shell."""
    first = project(str(folder))
    assert first.startswith("my-project-")
    assert first != project(str(folder.parent / "other" / "my project"))
    monkeypatch.setenv("LOGNAME", "somebody")
    assert first != project(str(folder))
    for odd in ("/", "/a/…", "/a/..", "/a/-rf", "/a/.hidden", "/a/" + "x" * 300):
        assert agent_workdir.place(project(odd), "/cache") == f"/cache/files/{project(odd)}"


def test_an_agent_makes_folders_in_its_cache_and_nowhere_else() -> None:
    for name in ("../x", "a/b", ".hidden", "..", "a b", "$(x)", "a\n"):
        with pytest.raises(ProtocolError):
            pytest.fail(agent_workdir.place(name, "/cache"))


def test_a_path_that_was_named_is_made_and_stays(folder: Path, remote: list[sky.Host], spot: object) -> None:
    for workdir in ("~/kept/deep", f"{spot / 'named'}"):  # type: ignore[operator]
        with sky.Compute(remote[:1], workdir=workdir, ui="none") as compute:
            place = sky.function(write)("a.txt", "1") >> compute
        assert place.endswith(workdir.removeprefix("~"))
        with sky.Compute([replace(remote[0], workdir=workdir)], ui="none") as compute:
            assert sky.function(read)("a.txt") >> compute == "1"


def test_a_temporary_folder_goes_with_the_pool(folder: Path, remote: list[sky.Host]) -> None:
    for host in (remote[0], replace(remote[0], workdir="temp")):
        chosen = {"workdir": "temp"} if host.workdir == "auto" else {}
        with sky.Compute([host], ui="none", **chosen) as compute:  # type: ignore[arg-type]
            place = sky.function(write)("a.txt", "1") >> compute
            assert sky.function(here)() @ compute == [place]
        with sky.Compute(remote[:1], ui="none") as compute:
            assert not sky.function(os.path.exists)(place) >> compute


def test_the_pools_choice_comes_before_the_hosts(folder: Path) -> None:
    host = sky.Host(name="node1", workdir="/data")
    assert Workdirs("auto").of(host) == Workdir("/data")
    assert Workdirs("/other").of(host) == Workdir("/other")
    assert Workdirs("temp").of(host) == Workdir("")
    local = sky.Host(name="here", transport="local")
    assert Workdirs("auto").of(local) == Workdirs(folder).of(local) == Workdir(str(folder), callers=True)
    folder.rmdir()
    assert Workdirs("auto").of(local) == Workdir("")


def test_what_cannot_be_a_working_folder_is_refused() -> None:
    for wrong in ("", "relative", "~nobody-of-that-name/data"):
        with pytest.raises(sky.UsageError, match="workdir"):
            sky.Compute("local", workdir=wrong)
        with pytest.raises(sky.UsageError, match="workdir"):
            sky.Host(name="node1", workdir=wrong)


def test_a_folder_that_cannot_be_made_is_said_by_every_call(folder: Path, remote: list[sky.Host]) -> None:
    with sky.Compute(remote[:1], workdir="/proc/nothing/here", ui="none") as compute:
        for _ in range(2):
            with pytest.raises(sky.HostUnfit, match="cannot use the working folder /proc/nothing/here"):
                sky.function(here)() >> compute
        with pytest.raises(sky.BroadcastError) as caught:
            sky.function(here)() @ compute
        assert isinstance(caught.value.exceptions[0], sky.HostUnfit)


def test_the_folder_is_nobody_elses(folder: Path, remote: list[sky.Host]) -> None:
    def mode() -> int:
        return Path.cwd().stat().st_mode

    with sky.Compute(remote[:1], ui="none") as compute:
        assert stat.S_IMODE(sky.function(mode)() >> compute) == 0o700


# ---- what was included


def test_what_was_included_lies_in_the_working_folder_and_beside_the_modules(
    folder: Path, remote: list[sky.Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("data.csv", "1,2")
    write("configs/deep/a.json", "{}")
    write(
        "uses_its_data.py", "from pathlib import Path\ndef beside(n): return (Path(__file__).parent / n).read_text()\n"
    )
    monkeypatch.syspath_prepend(folder)
    import uses_its_data

    image = sky.Image(includes=["data.csv", "configs/"])
    for workdir in ("auto", "temp"):
        with sky.Compute(remote[:1], image=image, workdir=workdir, ui="none") as compute:
            assert sky.function(read)("data.csv") >> compute == "1,2"
            assert sky.function(read)("configs/deep/a.json") >> compute == "{}"
            assert sky.function(uses_its_data.beside)("data.csv") >> compute == "1,2"
            assert sky.function(uses_its_data.beside)("configs/deep/a.json") >> compute == "{}"


def test_what_was_included_is_as_it_is_here(folder: Path, remote: list[sky.Host]) -> None:
    write("data.csv", "old")
    with sky.Compute(remote[:1], image=sky.Image(includes=["data.csv"]), ui="none") as compute:
        assert sky.function(read)("data.csv") >> compute == "old"
        sky.function(write)("data.csv", "changed there") >> compute
        write("data.csv", "new")
        assert sky.function(read)("data.csv") >> compute == "new"


def test_on_this_machine_nothing_is_laid_out_over_the_callers_files(
    folder: Path, open_pool: Callable[..., sky.Compute]
) -> None:
    write("data.csv", "1")
    before = Path("data.csv").stat()
    pool = open_pool(image=sky.Image(includes=["data.csv"]))
    assert sky.function(read)("data.csv") >> pool == "1"
    sky.function(write)("data.csv", "2") >> pool
    assert sky.function(read)("data.csv") @ pool == ["2"]
    assert Path("data.csv").stat().st_ino == before.st_ino
    assert [path.name for path in folder.iterdir()] == ["data.csv"]


# ---- what is said


def told(found: list[Event]) -> list[FilesWritten]:
    return [event for event in found if isinstance(event, FilesWritten)]


def test_a_pool_that_wrote_says_what_lies_where_and_how_to_fetch_it(
    folder: Path, remote: list[sky.Host], tmp_path: Path
) -> None:
    found: list[Event] = []
    compute = sky.Compute(remote, image=sky.Image(includes=[write("x", "") and "x"]), ui="none")
    compute.events.subscribe(found.append)
    with compute:
        compute.submit(sky.function(write)("out/ckpt.pt", "12345"), on="node1").result()
        compute.submit(sky.function(read)("x"), on="node2").result()
    (event,) = told(found)
    name = project(str(folder))
    assert str(event).startswith(
        f"node1: wrote 1 file (5 bytes): out/ckpt.pt in {remote[0].cache}/files/{name}\n  to fetch: "
    )
    lax = ["-q", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    program, *words = shlex.split(event.fetch)
    subprocess.run([program, *lax, *words], cwd=tmp_path, check=True)
    assert (tmp_path / "node1" / "out/ckpt.pt").read_text() == "12345"


def test_a_pool_that_wrote_nothing_says_nothing(folder: Path, remote: list[sky.Host]) -> None:
    with sky.Compute(remote[:1], ui="none") as compute:
        sky.function(write)("before.txt", "1") >> compute
    found: list[Event] = []
    for workdir in ("auto", "temp"):
        compute = sky.Compute(remote[:1], workdir=workdir, ui="none")
        compute.events.subscribe(found.append)
        with compute:
            sky.function(read)("before.txt") >> compute if workdir == "auto" else sky.function(write)(
                "a", ""
            ) >> compute
    assert told(found) == []


# ---- skyfab run


@pytest.mark.slow
def test_a_detached_script_leaves_its_files(folder: Path, remote: list[sky.Host], tmp_path: Path) -> None:
    (folder / "saves.py").write_text(SAVES)
    place = inventory(tmp_path / "inventory.toml", remote[:1])
    started = skyfab(folder, "run", "--detach", "--hosts=node1", "saves.py", inventory=place)
    assert started.returncode == 0, started.stderr
    run = attach(started.stdout.strip(), inventory=place)
    run.result(timeout=170)
    assert [event.host for event in run.files()] == ["node1"]
    shown = skyfab(folder, "attach", run.id, inventory=place)
    assert "node1: wrote 1 file (1 byte): ckpt.pt in ~/.cache/skyfab/files/my-project-" in shown.stderr
    assert "\n  to fetch: skyfab get ckpt.pt --hosts=node1 --to=node1\n" in shown.stderr
    with sky.Compute(remote[:1], ui="none") as compute:
        assert sky.function(read)("ckpt.pt") >> compute == "x"


# ---- a file that is here


def test_a_missing_file_that_is_here_is_named_with_what_to_do(folder: Path, remote: list[sky.Host], lab: Lab) -> None:
    write("sub/data.csv", "1")
    with sky.Compute(remote[:1], ui="none") as compute:
        with pytest.raises(FileNotFoundError) as caught:
            sky.function(read)("sub/data.csv") >> compute
        note = f"hint: {folder}/sub/data.csv exists on this machine, not on node1: Image(includes=['sub/data.csv'])"
        assert note in text_of(caught.value)
        absolute = [str(folder / "sub/data.csv")] if lab.kind == "namespace" else []  # loopback hosts do have it
        for elsewhere in ("nowhere.csv", *absolute):
            with pytest.raises(FileNotFoundError) as caught:
                sky.function(read)(elsewhere) >> compute
            assert "includes" not in text_of(caught.value)


def text_of(error: BaseException) -> str:
    """What a traceback has of it besides its message, in whichever Python."""
    return "\n".join(getattr(error, "__notes__", [])) + str(error.__cause__)
