"""Files to hosts and back, over SSH: odd names, what is sent, interruptions, full disks, and the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import labs
from stage.projects import inventory, skyfab
from stage.spot import until
from stage.threads import at_once
from test_transfer import state
from test_transfer import top as top  # a fixture

import skyfab as sky
from skyfab.detached.written import project
from skyfab.errors import HostUnfit, UsageError
from skyfab.files.draft import part_of
from skyfab.files.source import PIECE
from skyfab.lab import Lab, LabHost
from skyfab.pool.file_worker import Remote
from skyfab.ui.events import Event, Notice

pytestmark = pytest.mark.lab

MB = 1 << 20


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, for which each host has a working folder."""
    made = tmp_path / "here"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


def read(name: str) -> str:
    return Path(name).read_text()


def sent(pool: sky.Compute) -> int:
    """Bytes that have gone to the host."""
    return sum(node.session.moved[0] for node in pool.hosts)


def test_there_and_back(here: Path, top: Path, open_pool: Callable[..., sky.Compute], transport: str) -> None:
    pool = open_pool(transport, count=1)
    up = pool.upload(top, to="copy")
    assert [report.sent for report in up] == [report.files for report in up]
    down = pool.download("copy", to="back")
    assert state(here / "back" / "copy") == state(top)
    assert down[0].sent_size == down[0].size == up[0].size


def test_a_relative_place_is_that_of_functions(here: Path, open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=2)
    (here / "data").mkdir()
    (here / "data" / "x.csv").write_text("1,2")
    pool.upload("data")
    assert sky.function(read)("data/x.csv") @ pool == ["1,2"] * 2
    pool.upload("data/x.csv", to="y.csv", on="head")
    assert sky.function(read)("y.csv") >> pool == "1,2"
    pool.upload("data/x.csv", to="into/")
    pool.upload("data/x.csv", to="data")  # a folder that is there
    assert sky.function(read)("into/x.csv") >> pool == "1,2"


def test_what_is_there_is_not_sent_again(here: Path, open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=1)
    (here / "data").mkdir()
    for number in range(300):
        (here / "data" / f"{number}.bin").write_bytes(os.urandom(5000))
    pool.upload("data")
    before = sent(pool)
    assert pool.upload("data")[0].sent == 0
    assert sent(pool) - before < 50_000
    (here / "data" / "7.bin").write_bytes(os.urandom(100_000))
    before = sent(pool)
    assert (pool.upload("data")[0].sent, pool.upload("data")[0].sent) == (1, 0)
    assert 100_000 < sent(pool) - before < 200_000
    assert pool.download("data", to="back")[0].sent == 300
    received = pool.hosts[0].session.moved[1]
    assert pool.download("data", to="back")[0].sent == 0
    assert pool.hosts[0].session.moved[1] - received < 50_000


def test_from_several_hosts_what_one_alone_has_keeps_its_place(
    here: Path, open_pool: Callable[..., sky.Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    ask = Remote.ask
    monkeypatch.setattr(Remote, "ask", lambda self, *words: requests.append(words[0]) or ask(self, *words))
    pool = open_pool("openssh", count=2)
    events: list[Event] = []
    pool.events.subscribe(events.append)

    def write() -> None:
        info = sky.instance_info()
        Path("ckpt").mkdir(exist_ok=True)
        Path(f"ckpt/{info.rank}.pt").write_text(str(info.rank))
        if info.rank == 0:
            Path("only").write_text("x")

    sky.function(write)() @ pool
    pool.download("ckpt/*.pt", to="all")
    assert requests.count("send") == 2, "each host lists its files once"
    assert sorted(str(path.relative_to(here)) for path in here.rglob("*.pt")) == [
        "all/ckpt/0.pt",
        "all/ckpt/1.pt",
    ]
    pool.download("ckpt", to="one", on="node2")
    assert (here / "one" / "ckpt" / "1.pt").read_text() == "1"
    pool.download(["only", "ckpt"], to="some")
    pool.download("only", to="lone")
    assert [path.name for path in (here / "lone").iterdir()] == ["only"]
    assert [event.host for event in events if isinstance(event, Notice)] == ["node2", "node2"]
    with pytest.raises(UsageError, match="no file matches missing"):
        pool.download("missing", to="none")
    assert not (here / "none").exists()


def test_a_file_that_was_sent_to_all_and_that_one_host_has_written_since_keeps_its_place(
    here: Path, open_pool: Callable[..., sky.Compute]
) -> None:
    """As with a checkpoint that is sent to all hosts, from which they resume, and that rank 0 writes again."""
    pool = open_pool("openssh", count=2)
    (here / "ckpt").mkdir()
    (here / "ckpt" / "last.pt").write_text("step 1")
    pool.upload("ckpt")
    sky.function(Path.write_text)(Path("ckpt/last.pt"), "step 2") >> pool
    pool.download("ckpt/*")
    assert (here / "ckpt" / "last.pt").read_text() == "step 2"
    pool.upload("ckpt")
    assert sky.function(read)("ckpt/last.pt") @ pool == ["step 2"] * 2


def test_from_several_hosts_what_both_have_goes_into_folders_of_their_names(
    here: Path, open_pool: Callable[..., sky.Compute]
) -> None:
    pool = open_pool("openssh", count=2)

    def write() -> None:
        rank = sky.instance_info().rank
        for path in (Path("d"), Path("node1"), Path("kinds") if rank else Path("d/both")):
            path.mkdir(exist_ok=True)
        Path("d/log").write_text(str(rank))
        Path("d/latest").symlink_to("log")
        Path(f"d/{rank}.pt").write_text(str(rank))
        Path(f"node1/{rank}").write_text(str(rank))
        Path("kinds/x" if rank else "kinds").write_text(str(rank))
        if rank == 0:
            Path("d/last").symlink_to("log")

    sky.function(write)() @ pool
    reports = pool.download(["d", "node1", "kinds"], to="all")
    found = {str(path.relative_to(here / "all")): path.read_text() for path in here.rglob("*") if path.is_file()}
    assert found == {
        "d/0.pt": "0",
        "d/1.pt": "1",
        "node1/d/log": "0",
        "node2/d/log": "1",
        "node1/d/last": "0",
        "node1/d/latest": "0",
        "node2/d/latest": "1",
        "node1/node1/0": "0",
        "node2/node1/1": "1",
        "node1/kinds": "0",
        "kinds/x": "1",
    }
    assert (here / "all/d/both").is_dir()
    assert [report.folder for report in reports] == ["all", "all"]
    assert [report.folder for report in pool.download("d/log", to="apart")] == ["apart/node1", "apart/node2"]


def test_a_pattern_below_a_folder_that_one_host_alone_has(here: Path, open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=2)
    sky.function(os.makedirs)("deep/er") >> pool
    (here / "x").write_text("x")
    pool.upload("x", to="deep/er/x", on="node1")
    pool.download("deep/**", to="back")
    assert (here / "back/deep/er/x").read_text() == "x"


def test_two_uploads_at_once(here: Path, tmp_path: Path, open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=1)
    contents = {}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        for number in range(200):
            (tmp_path / name / str(number)).write_text(name * 100)
        contents[name] = os.urandom(2 * PIECE)
        (tmp_path / name / "large").write_bytes(contents[name])
    at_once(lambda name: pool.upload(tmp_path / name, to="same"), contents, 170)
    pool.download("same", to="back")
    found = {path.name: path.read_bytes() for path in (here / "back" / "same").iterdir()}
    assert found.pop("large") in contents.values()
    assert set(found.values()) <= {b"one" * 100, b"other" * 100}
    assert len(found) == 200


# ---- what fails


@pytest.fixture(scope="module")
def breakable() -> Iterator[Lab]:
    """A host of this module's own."""
    with labs.start_for_calls(1) as lab:
        yield lab


def test_a_full_disk(namespaces: Lab, breakable: Lab, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = breakable.hosts[0]
    host.run(["mkdir", "-p", "/small"])
    host.small_disk("/small", 16)
    (here / "data").mkdir()
    for number in range(12):
        (here / "data" / str(number)).write_bytes(os.urandom(MB))
    (here / "large").write_bytes(os.urandom(12 * MB))
    with sky.Compute(inventory=breakable.inventory, ui="none") as pool:
        pool.upload("large", to="/small/")
        with pytest.raises(HostUnfit, match=r"they need 13 MB, .* MB is free"):
            pool.upload("data", to="/small/data")
        host.run(["rm", "/small/large"])
        host.run(["sh", "-c", "cat /dev/zero >/small/fill"], check=False)
        with monkeypatch.context() as patched:
            patched.setattr("skyfab.pool.files.fits", lambda *_: None)  # it was filled after the look
            with pytest.raises(HostUnfit, match="No space left") as caught:
                pool.upload("large", to="/small/large")
        assert "free some space" in (caught.value.hint or "")
        assert host.run(["find", "/small", "-type", "f"]).stdout.split() == ["/small/fill"]
        host.run(["rm", "/small/fill"])
        assert pool.upload("data", to="/small/data")[0].sent == 12
    host.run(["umount", "/small"])


def test_no_room_here(breakable: Lab, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").write_bytes(bytes(MB))
    with sky.Compute(inventory=breakable.inventory, ui="none") as pool:
        pool.upload("file")
        monkeypatch.setattr("skyfab.files.target.Target.room", 1000)
        with pytest.raises(OSError, match="not enough space for these files"):
            pool.download("file", to="back")
    assert not (here / "back" / "file").exists()


def parts(host: LabHost, folder: Path, name: bytes) -> Path:
    cache = host.path("/root/.cache/skyfab/files")
    return cache / project(str(folder)) / os.fsdecode(part_of(name))


@pytest.mark.slow
def test_an_upload_goes_on_where_it_stopped(namespaces: Lab, breakable: Lab, here: Path) -> None:
    host = breakable.hosts[0]
    content = os.urandom(32 * MB)
    (here / "large").write_bytes(content)
    part = parts(host, here, b"large")
    command = [sys.executable, "-m", "skyfab", "put", "large", f"--inventory={breakable.inventory}"]
    host.slow(100)
    try:
        with subprocess.Popen(command, cwd=here, stderr=subprocess.DEVNULL) as client:
            until(lambda: part.exists() and part.stat().st_size >= 2 * PIECE, 60)
            client.kill()
    finally:
        host.slow(None)
    assert not part.with_name("large").exists()
    begun = part.stat().st_size
    assert begun < len(content)
    with sky.Compute(inventory=breakable.inventory, ui="none") as pool:
        report = pool.upload("large")[0]
        assert report.sent_size <= len(content) - begun
        assert part.with_name("large").read_bytes() == content
        assert not part.exists()


def test_a_host_cannot_be_told_to_follow_links_out(here: Path, open_pool: Callable[..., sky.Compute]) -> None:
    """What a program there has linked elsewhere arrives as the file, and folders elsewhere do not."""
    pool = open_pool("openssh", count=1)
    events: list[Event] = []
    pool.events.subscribe(events.append)

    def link() -> None:
        Path("out").mkdir()
        Path("out/passwd").symlink_to("/etc/passwd")
        Path("out/etc").symlink_to("/etc")

    sky.function(link)() >> pool
    pool.download("out")
    assert [path.name for path in (here / "out").iterdir()] == ["passwd"]
    assert not (here / "out" / "passwd").is_symlink()
    assert "skipped out/etc" in "".join(map(str, events))


def test_a_target_that_cannot_be_written(here: Path, open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool("openssh", count=1)
    (here / "file").write_text("x")
    with pytest.raises(HostUnfit, match="/proc/nothing"):
        pool.upload("file", to="/proc/nothing/file")
    assert pool.upload("file")[0].sent == 1


# ---- the command line

TRAINS = """
import os
from pathlib import Path

text = Path("data/x.csv").read_text()
Path("ckpt").mkdir(exist_ok=True)
Path(f"ckpt/{os.environ['RANK']}.pt").write_text(text + os.environ["RANK"])
if "fail" in text:
    raise SystemExit(3)
"""


@pytest.fixture
def listed(tmp_path: Path, hosts_of: Callable[..., list[Any]]) -> Path:
    return inventory(tmp_path / "inventory.toml", hosts_of("openssh", 2))


@pytest.mark.slow
def test_put_and_get(here: Path, listed: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "-odd name").write_text("x")
    done = skyfab(here, "put", "data", "--hosts=node1,node2", inventory=listed)
    assert done.returncode == 0, done.stderr
    assert [line.partition(" in ")[0] for line in done.stdout.splitlines()] == [
        "node1: 1 file, 1 byte; sent 1, 1 byte,",
        "node2: 1 file, 1 byte; sent 1, 1 byte,",
    ]
    assert done.stderr == ""  # what was sent is not told of as written there
    done = skyfab(here, "exec", "node1", "--", "ls data; touch data/new", inventory=listed)
    assert (done.stdout, done.stderr) == ("node1 -odd name\n", ""), "exec runs where put has put it"
    skyfab(here, "exec", "node1", "--", "rm data/new", inventory=listed)
    done = skyfab(here, "get", "data/*", "--hosts=node1", "--to=back", inventory=listed)
    assert done.returncode == 0, done.stderr
    assert (here / "back" / "data" / "-odd name").read_text() == "x"
    assert done.stdout.startswith("node1: 1 file, 1 byte; fetched 1, 1 byte into back/, in ")
    skyfab(here, "exec", "node1", "--", "touch only", inventory=listed)
    done = skyfab(here, "get", "only", "--hosts=node1,node2", inventory=listed)
    (line,) = done.stdout.splitlines()
    assert line.startswith("node1: 1 file, 0 bytes; fetched 1, 0 bytes into ./, in ")
    assert done.stderr == "node2: no file matches only\n"
    done = skyfab(here, "get", "nothing", "--hosts=node1", inventory=listed)
    assert done.returncode == 2
    assert "node1: no file matches nothing" in done.stderr


def test_run_sends_data_and_brings_results_back(here: Path, listed: Path) -> None:
    """Also of a run that fails."""
    (here / "train.py").write_text(TRAINS)
    (here / "data").mkdir()
    (here / "data" / "x.csv").write_text("fail")
    (here / "data" / "ignored.csv").write_text("not sent")
    (here / ".gitignore").write_text("ignored.csv\n")
    words = ("run", "--hosts=node1,node2", "--sync", "--get=ckpt/*", "--get=data", "train.py")
    done = skyfab(here, *words, inventory=listed)
    assert done.returncode == 1, done.stderr
    assert "to fetch" not in done.stderr, "all that was written has been fetched"
    for rank in range(2):
        assert (here / "ckpt" / f"{rank}.pt").read_text() == f"fail{rank}"
        assert [path.name for path in (here / f"node{rank + 1}" / "data").iterdir()] == ["x.csv"]
    again = skyfab(here, "run", "--hosts=node1,node2", "--sync", "--get=node*", "train.py", inventory=listed)
    assert "node1: 5 files" in again.stderr, "folders of the hosts' names are not sent back"
    assert "no file matches node*" in again.stderr


def test_what_a_detached_run_wrote_is_fetched_to_where_it_was_typed(here: Path, tmp_path: Path, listed: Path) -> None:
    (here / "saves.py").write_text("from pathlib import Path\nPath('ckpt.pt').write_text('x')\n")
    done = skyfab(here, "run", "--hosts=node1", "--detach", "--get=*.pt", "saves.py", inventory=listed)
    assert done.returncode == 0, done.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ended = skyfab(elsewhere, "logs", "-f", done.stdout.strip(), inventory=listed)
    assert ended.returncode == 0, ended.stderr
    assert "to fetch" not in ended.stderr
    assert (here / "ckpt.pt").read_text() == "x"
    assert not list(elsewhere.iterdir())


BESIDE = """
import sys, time
from pathlib import Path

Path("ckpt").mkdir(exist_ok=True)
Path("ckpt/last.pt").write_text(sys.argv[1])
Path(f"ckpt/{sys.argv[1]}.log").write_text("")
print("saved", flush=True)
while not Path("end").exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_files_of_runs_at_once_are_fetched_from_the_folder_of_each(here: Path, listed: Path) -> None:
    (here / "beside.py").write_text(BESIDE)

    def ran(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = skyfab(here, *words, inventory=listed)
        assert done.returncode == code, done.stderr
        return done

    ids = {}
    for name in ("day", "night", "night"):
        begun = ran("run", "--hosts=node1", "--detach", f"--name={name}", "beside.py", name)
        is_second = name in ids
        said = f"also running under this name: {ids.get(name)}; the name now refers to {begun.stdout}"
        assert (said in begun.stderr) == is_second
        ids[name] = begun.stdout.strip()
        until(lambda begun=begun: "saved" in ran("logs", begun.stdout.strip()).stdout, "the script has written")
    for name, id_ in ids.items():
        ran("get", "ckpt/last.pt", "ckpt/*.log", f"--run={name}", f"--to={name}")
        assert (here / name / "ckpt" / "last.pt").read_text() == name
        logs = [path.name for path in (here / name / "ckpt").glob("*.log")]
        assert logs == [f"{name}.log"], "what was copied with the folder is not the run's own"
        said = ran("get", f"--run={id_}", code=2).stderr
        assert f"error: run {id_} (running) lists no files before it has ended\n" in said
        assert f"hint: name them: skyfab get --run={id_} PATH\n" in said
    ran("stop", "--all", "--yes", "--hosts=node1")
    for name, id_ in ids.items():
        ran("get", f"--run={id_}", f"--to={name}.all")
        assert (here / f"{name}.all" / "ckpt" / "last.pt").read_text() == name
        assert not (here / f"{name}.all" / "beside.py").exists(), "it is not what the run wrote"
    assert "no file matches end" in ran("get", "end", "--run=day", code=2).stderr


@pytest.mark.slow
def test_only_what_a_run_has_written_is_fetched_of_a_folder_that_others_use_too(here: Path, listed: Path) -> None:
    (here / "write.py").write_text(
        "import sys\nfor name in sys.argv[1:]:\n    with open(name, 'w') as file:\n        file.write(sys.argv[1])\n"
    )
    for names in (["first", "[odd] *"], ["second", "third"], ["last"]):
        done = skyfab(
            here, "run", "--hosts=node1", "--detach", f"--name={names[0]}", "write.py", *names, inventory=listed
        )
        assert done.returncode == 0, done.stderr
        assert skyfab(here, "attach", names[0], inventory=listed).returncode == 0
    assert skyfab(here, "get", "--run=second", "--to=its", inventory=listed).returncode == 0
    assert {path.name for path in (here / "its").iterdir()} == {"second", "third"}
    assert skyfab(here, "get", "--run=first", "--to=all", inventory=listed).returncode == 0
    assert {path.name for path in (here / "all").iterdir()} >= {"first", "[odd] *"}, "a name that looks like a pattern"


@pytest.mark.slow
def test_a_run_that_is_not_found_may_be_of_the_inventory_that_was_used_last(
    here: Path, tmp_path: Path, listed: Path
) -> None:
    (here / "saves.py").write_text("from pathlib import Path\nPath('ckpt.pt').write_text('x')\n")
    begun = skyfab(here, "run", "--hosts=node1", "--detach", "saves.py", inventory=listed)
    assert begun.returncode == 0, begun.stderr
    typed = f"the same command with --inventory={listed}\n"
    for words in (["logs"], ["get", "ckpt.pt", "--run"]):
        none = skyfab(here, *words, begun.stdout.strip())
        assert none.returncode == 2
        assert none.stderr.endswith(f"hint: the last run used another inventory: {typed}"), none.stderr
    named = skyfab(here, "logs", "nobody", inventory=listed)
    assert named.stderr.endswith("hint: to list runs: skyfab runs\n"), "it is this inventory"
    fresh = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}  # other tests leave runs on this machine
    assert skyfab(here, "runs", **fresh).stderr.endswith("skyfab runs --inventory=FILE\n")
    (tmp_path / "cache" / "skyfab").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache" / "skyfab" / "last-inventory").write_text(str(listed))
    assert skyfab(here, "runs", **fresh).stderr.endswith(f"skyfab runs --inventory={listed}\n")
    listed.unlink()
    assert skyfab(here, "runs", **fresh).stderr.endswith("skyfab runs --inventory=FILE\n")


WAITS = """
import os, signal, time
from pathlib import Path

def save(*_):
    time.sleep(0.5)
    Path("ckpt.pt").write_text("stopped")
    os._exit(0)

signal.signal(signal.SIGTERM, save)
Path("ckpt.pt").write_text("half")
print("saved", flush=True)
time.sleep(100)
"""


def test_ctrl_c_stops_the_run_and_fetches_what_it_wrote(here: Path, listed: Path) -> None:
    (here / "waits.py").write_text(WAITS)
    words = ["run", f"--inventory={listed}", "--hosts=node1", "--get=*.pt", "waits.py"]
    with subprocess.Popen(
        [sys.executable, "-m", "skyfab", *words], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None and client.stderr is not None
        assert client.stdout.readline() == "node1[0] saved\n"
        client.send_signal(signal.SIGINT)
        said = client.stderr.read()
        assert client.wait(60) == 130, said
    assert (here / "ckpt.pt").read_text() == "stopped", said
    assert "fetched 1" in said
    assert said.splitlines()[-1] == "interrupted: stopped on node1"
