"""`Mirror`: what comes from hosts, each of which is a process beside this one; in which order, and how fast."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage.spot import until
from test_files import SPEC, Served, fill, tree

from skyfab.errors import ProtocolError, UsageError
from skyfab.files.source import PIECE
from skyfab.host import mirror as host_mirror
from skyfab.pool import mirror
from skyfab.pool.file_worker import Remote
from skyfab.pool.mirror import Mirror
from skyfab.ui.events import Event, Events, Notice


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes long."""
    monkeypatch.setattr(host_mirror, "_QUIET", (0.1, 0.05))
    for name, seconds in (("_PACE", 0.05), ("_LONGEST", 0.1), ("_RETRY", 0.05), ("_MOMENT", 0.1)):
        monkeypatch.setattr(mirror, name, seconds)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def events() -> list[Event]:
    return []


Open = Callable[..., Mirror]


def notices(events: list[Event]) -> list[tuple[str | None, str]]:
    return [(event.host, event.text) for event in events if isinstance(event, Notice)]


@pytest.fixture
def nodes(tmp_path: Path, soon: None) -> Iterator[list[Any]]:
    made = [Served(name, tmp_path / name) for name in ("n1", "n2")]
    yield made
    for node in made:
        node.close()
        assert set(node.specs) == set(node.released), "every worker is released"


@pytest.fixture
def open_mirror(here: Path, nodes: list[Any], events: list[Event]) -> Iterator[Open]:
    opened: list[Mirror] = []
    emitted = Events()
    emitted.subscribe(events.append)

    def open_it(*paths: str, to: str = ".", limit: str | None = None, on: Any = None) -> Mirror:
        made = Mirror(paths or ["ckpt"], to, limit, nodes[:1] if on is None else on, lambda node, tree: SPEC, emitted)
        opened.append(made)
        return made

    yield open_it
    for one in opened:
        one.leave()


def test_what_appears_comes_and_what_is_removed_stays(here: Path, nodes: list[Any], open_mirror: Open) -> None:
    with open_mirror(to="results") as made:  # before there is a folder on the host
        fill(nodes[0].folder, ckpt__1_pt="one", other__2_pt="two")
        until(lambda: tree(here) == {"results/ckpt/1.pt": "one"})
        shutil.rmtree(nodes[0].folder / "ckpt")
        fill(nodes[0].folder, ckpt__deep__3_pt="three")
        until(lambda: len(tree(here)) == 2)
        fill(nodes[0].folder, ckpt__4_pt="four")
    assert tree(here) == {
        "results/ckpt/1.pt": "one",
        "results/ckpt/4.pt": "four",
        "results/ckpt/deep/3.pt": "three",
    }, "what was written last came with the last look"
    assert str(made.reports[0]).startswith("n1: 3 files, 12 bytes; fetched 3, 12 bytes into results/, in ")


def test_what_is_here_is_not_sent_again_by_the_next_mirror(
    here: Path, nodes: list[Any], open_mirror: Open, events: list[Event]
) -> None:
    fill(nodes[0].folder, ckpt__1_pt="one")
    (nodes[0].folder / "ckpt" / "2.pt").write_bytes(bytes(3 * PIECE))
    for sent in (2, 0):
        assert open_mirror().stop()[0].sent == sent
    assert not events


def test_the_newest_comes_first_also_if_it_appears_later(
    monkeypatch: pytest.MonkeyPatch, here: Path, nodes: list[Any], open_mirror: Open
) -> None:
    size = PIECE + 10
    monkeypatch.setattr(host_mirror, "_PASS", 1)
    nodes.append(node := Served("n3", nodes[0].folder.parent / "n3"))  # which has the changed limit
    folder = node.folder / "ckpt"
    folder.mkdir()
    names = {3: "a.pt", 2: "b.pt", 1: "c.pt"}  # as a folder is listed, the oldest would be the first
    for age, name in names.items():
        path = folder / name
        path.write_bytes(bytes(size if age % 2 else size * 2))
        os.utime(path, (time.time() - 1000 * age,) * 2)
    order: list[str] = []

    def note() -> None:
        order.extend(path.name for path in here.rglob("*.pt") if path.name not in order)
        if len(order) == 1:
            (folder / "d.pt").write_bytes(bytes(size))
            time.sleep(0.2)

    time.sleep(0.2)  # all are quiet
    node.says["fetched"] = note
    open_mirror(on=[node]).stop()
    assert order == ["c.pt", "d.pt", "b.pt", "a.pt"]


def test_a_file_that_is_being_written_waits(here: Path, nodes: list[Any], open_mirror: Open) -> None:
    folder = nodes[0].folder / "ckpt"
    fill(nodes[0].folder, ckpt__whole="whole")
    with open_mirror() as made, (folder / "open").open("w") as file:
        file.write("first ")
        file.flush()
        fill(nodes[0].folder, ckpt__later="later")
        until(lambda: len(tree(here)) == 2)
        time.sleep(0.3)  # it does not change, but somebody has it open
        assert "ckpt/open" not in tree(here)
        file.write("second")
        file.close()
        until(lambda: tree(here).get("ckpt/open") == "first second")
        log = (folder / "log").open("w")
        log.write("line")
        log.flush()
        time.sleep(0.3)
        made.stop()
        log.close()
    assert tree(here)["ckpt/log"] == "line", "at the end, what is open is a log"


def test_a_file_that_somebody_appends_to_is_left_out(
    here: Path, nodes: list[Any], open_mirror: Open, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program that opens it for each line, as those of a shell."""
    over = threading.Event()
    fill(nodes[0].folder, ckpt__log="")

    def append() -> None:
        while not over.wait(0.005):
            with (nodes[0].folder / "ckpt" / "log").open("a") as file:
                file.write("line\n")

    thread = threading.Thread(target=append)
    thread.start()
    try:
        open_mirror().stop()
        assert tree(here) == {}
        assert notices(events) == [("n1", "1 file not mirrored: still being written")]
    finally:
        over.set()
        thread.join()
    open_mirror().stop()
    assert tree(here)["ckpt/log"].endswith("line\n")


@pytest.mark.parametrize(
    ("change", "size"),
    [("rewritten", 3 * PIECE), ("replaced", 3 * PIECE), ("removed", 1000), ("truncated", 1000)],
)
def test_a_file_that_changes_while_it_is_mirrored_is_never_half(
    here: Path, nodes: list[Any], open_mirror: Open, events: list[Event], size: int, change: str
) -> None:
    path = nodes[0].folder / "ckpt" / "last.pt"
    path.parent.mkdir()
    path.write_bytes(b"1" * size)
    seen: list[bytes] = []

    def look() -> None:
        if (here / "ckpt" / "last.pt").exists():
            seen.append((here / "ckpt" / "last.pt").read_bytes())

    def spoil() -> None:
        look()
        if len(seen) or spoiled:
            return
        spoiled.append(True)
        if change == "replaced":
            path.with_name("draft").write_bytes(b"2" * size)
            path.with_name("draft").replace(path)
        elif change == "removed":
            path.unlink()
        else:
            writer.append(path.open("r+b" if change == "rewritten" else "wb", buffering=0))
            writer[0].write(b"2" * (size // 2))

    spoiled: list[bool] = []
    writer: list[Any] = []
    nodes[0].says["pack" if size < PIECE else "piece"] = spoil
    nodes[0].says["fetched"] = look
    made = open_mirror("ckpt/last.pt")
    until(lambda: spoiled)
    time.sleep(0.3)  # a program that takes long: it has the file open
    look()
    for file in writer:
        file.seek(0)
        file.write(b"3" * size)
        file.close()
    if change == "replaced":
        path.write_bytes(b"3" * size)
    if change != "removed":
        until(lambda: (here / "ckpt" / "last.pt").exists() and (here / "ckpt" / "last.pt").read_bytes()[:1] == b"3")
    made.stop()
    assert all(content in (b"1" * size, b"2" * size, b"3" * size) for content in seen)
    assert not spoiled[1:]
    assert (here / "ckpt" / "last.pt").exists() == (change != "removed")
    assert not events, "that is normal"


def test_links(here: Path, tmp_path: Path, nodes: list[Any], open_mirror: Open, events: list[Event]) -> None:
    fill(nodes[0].folder, ckpt__1_pt="one", secret="not asked for", private__key="k")
    for name, to in {"last": "1.pt", "up": "../secret", "etc": "/etc/hostname", "folder": "../private"}.items():
        (nodes[0].folder / "ckpt" / name).symlink_to(to)
    with open_mirror():
        until(lambda: (here / "ckpt" / "last").is_symlink())
        fill(nodes[0].folder, ckpt__2_pt="two")
        until(lambda: (here / "ckpt" / "2.pt").exists())
        (nodes[0].folder / "ckpt" / "last").unlink()
        (nodes[0].folder / "ckpt" / "last").symlink_to("2.pt")
    assert {path.name for path in (here / "ckpt").iterdir()} == {"1.pt", "2.pt", "last"}
    assert (here / "ckpt" / "last").readlink() == Path("2.pt")
    assert sorted(notices(events)) == [
        ("n1", "skipped ckpt/etc: a link to a file outside it"),
        ("n1", "skipped ckpt/folder: a link to a folder outside it"),
        ("n1", "skipped ckpt/up: a link to a file outside it"),
    ], "each once"


def test_two_mirrors_into_one_folder_are_refused(here: Path, nodes: list[Any], open_mirror: Open) -> None:
    first = open_mirror(to="results")
    with pytest.raises(UsageError, match=f"another mirror writes to {here}/results"):
        open_mirror("other", to="results")
    open_mirror("other", to="elsewhere", on=nodes[1:]).stop()
    first.stop()
    open_mirror(to="results").stop()


def test_nothing_is_mirrored_from_the_current_folder_itself(here: Path, nodes: list[Any], open_mirror: Open) -> None:
    """Else a file would be replaced by its copy while a program writes to it."""
    nodes[0].workdir.callers = True
    assert open_mirror(to="results").stop() == []
    assert not nodes[0].requests


def test_the_limit_holds_over_every_interval(
    monkeypatch: pytest.MonkeyPatch, here: Path, nodes: list[Any], open_mirror: Open
) -> None:
    """Of a clock that only waiting advances, for two hosts together."""
    clock, guard = SimpleNamespace(now=0.0), threading.Lock()
    asked: list[tuple[float, int]] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            with guard:
                clock.now += timeout or 0.0
            time.sleep(0.001)
            return self.is_set()

    kinds = {"Event": Event, "Thread": threading.Thread, "Lock": threading.Lock}
    monkeypatch.setattr(mirror, "threading", SimpleNamespace(**kinds))
    monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ask = Remote.ask

    def noted(self: Remote, request: str, *arguments: Any) -> Any:
        found = ask(self, request, *arguments)
        if request in ("piece", "pack"):
            asked.append((clock.now, len(found.result()[-1])))
        return found

    monkeypatch.setattr(Remote, "ask", noted)
    for node in nodes:
        (node.folder / "ckpt").mkdir()
        (node.folder / "ckpt" / "large").write_bytes(bytes(6 * PIECE))
        for number in range(30):
            (node.folder / "ckpt" / str(number)).write_bytes(bytes(100_000))
    time.sleep(0.2)
    reports = open_mirror(limit="2MB/s", on=nodes).stop()
    total = sum(size for _, size in asked)
    assert total == sum(report.sent_size for report in reports) == 2 * (6 * PIECE + 3_000_000)
    for at, (begin, _) in enumerate(asked):
        for end, _ in asked[at:]:
            size = sum(size for moment, size in asked if begin <= moment <= end)
            assert size <= 2e6 * (end - begin) + 2 * PIECE, "one request of each host is sent when it may be"
    assert asked[-1][0] - asked[0][0] <= total / 2e6 + 60, "only the looks take longer"


# ---- what fails


def test_a_full_disk_here_is_said_once_and_overcome(
    monkeypatch: pytest.MonkeyPatch, here: Path, nodes: list[Any], open_mirror: Open, events: list[Event]
) -> None:
    fill(nodes[0].folder, ckpt__1_pt="x" * 2000)
    with monkeypatch.context() as full:
        full.setattr("skyfab.files.target.Target.room", 1000)
        made = open_mirror()
        until(lambda: nodes[0].requests.count("news") >= 5)
        fill(nodes[0].folder, ckpt__2_pt="y" * 2000)
        until(lambda: nodes[0].requests.count("news") >= 10)
    made.stop()
    assert len(tree(here)) == 2
    ((host, text),) = notices(events)
    assert host == "n1"
    assert text.startswith("not mirrored: not enough space for these files: they need 2.0 kB, 1.0 kB is free")


def row(path: str, **changes: Any) -> bytes:
    about = {"path": path, "kind": "f", "size": 3, "time": 0, "mode": 0o644, "link": "", **changes}
    return json.dumps({"value": [[list(about.values())], []]}).encode()


@pytest.mark.parametrize(
    "says",
    [
        {"rows": row("../out")},
        {"rows": row("ckpt/../../out")},
        {"rows": row("elsewhere/1.pt")},
        {"rows": row("ckpt/link", kind="l", link="../../out")},
        {"rows": b'{"value": [[], []]}'},
        {"news": b'{"value": "all"}'},
    ],
    ids=["up", "inner", "not-requested", "link", "nothing", "news"],
)
def test_a_hostile_host_is_asked_no_more(
    here: Path, nodes: list[Any], open_mirror: Open, events: list[Event], says: dict[str, bytes]
) -> None:
    fill(nodes[0].folder, ckpt__1_pt="one")
    nodes[0].says.update(says)
    fill(nodes[1].folder, ckpt__1_pt="two")
    made = open_mirror(on=nodes)
    until(lambda: (here / "n2" / "ckpt" / "1.pt").exists() and notices(events))
    count = len(nodes[0].requests)
    time.sleep(0.3)
    assert len(nodes[0].requests) == count
    with pytest.raises(ProtocolError):
        made.stop()
    assert tree(here) == {"n2/ckpt/1.pt": "two"}
    assert not list(here.parent.glob("out*"))
    assert len(notices(events)) == 1


def test_a_host_that_was_lost_is_asked_again(
    here: Path, nodes: list[Any], open_mirror: Open, events: list[Event]
) -> None:
    path = nodes[0].folder / "ckpt" / "large.pt"
    path.parent.mkdir()
    content = os.urandom(20 * PIECE)
    path.write_bytes(content)
    lost: list[int] = []

    def lose() -> None:
        if nodes[0].requests.count("piece") == 12:
            lost.append(len(nodes[0].requests))
            nodes[0].session = object()

    nodes[0].says["piece"] = lose
    open_mirror().stop()
    assert (here / "ckpt" / "large.pt").read_bytes() == content
    assert lost
    again = nodes[0].requests[lost[0] :].count("piece")
    assert again <= 20 - 12 + 5, "only what was on its way is sent twice"
    assert notices(events) == [("n1", "not mirrored: it was lost during the transfer")]
