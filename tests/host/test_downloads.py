"""Downloads into a store: resumed, checked, one at a time, and the token only for the server that it is for."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage.hub import COMMIT, Hub, git_hash
from stage.spot import until

from skyfab.host import download as download_
from skyfab.host.ask.gc import _DRAFT
from skyfab.host.download import DAMAGED, REFUSED, UNREACHED, Downloads
from skyfab.host.hub import variables

LARGE = os.urandom(300_000)
SMALL = b"{}"
SHA = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(download_, "_TRIES", 2)
    with Hub() as made:
        made.add("org/model", {"large.bin": LARGE, "small.json": SMALL})
        yield made


@pytest.fixture
def downloads(tmp_path: Path) -> Iterator[Downloads]:
    found = Downloads(str(tmp_path / "cache"))
    yield found
    found.close()


def url(hub: Hub, path: str) -> str:
    return f"{hub.url}/org/model/resolve/{COMMIT}/{path}"


def download(downloads: Downloads, hub: Hub, path: str, data: bytes, tag: str = "", token: str = "") -> tuple[str, str]:
    """The name in the store, or why there is none."""
    tag = tag or (hashlib.sha256(data).hexdigest() if len(data) > 1000 else git_hash(data))
    downloads.begin(url(hub, path), tag, len(data), token)
    while True:
        done, name, problem, _ = downloads.look(10)
        if name or problem:
            assert done <= len(data)
            return name, problem


def stored(downloads: Downloads) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(downloads.store).iterdir()}


def draft_of(downloads: Downloads) -> Path:
    return Path(downloads.store, f".{SHA[:16]}-{SHA[16:]}.{socket.gethostname()}")


def test_what_has_come_has_the_name_of_its_content(downloads: Downloads, hub: Hub) -> None:
    assert download(downloads, hub, "large.bin", LARGE) == (SHA, "")
    small = hashlib.sha256(SMALL).hexdigest()
    assert download(downloads, hub, "small.json", SMALL) == (small, "")
    assert stored(downloads) == {SHA: LARGE, small: SMALL}
    asked = len(hub.asked)
    assert download(downloads, hub, "large.bin", LARGE) == (SHA, "")
    assert len(hub.asked) == asked, "the store has it"


def test_content_that_a_power_cut_has_damaged_is_not_found(
    downloads: Downloads, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size and the time of a file may be on the disk, and its content not."""
    download(downloads, hub, "large.bin", LARGE)
    path = Path(downloads.store, SHA)
    time = path.stat().st_mtime_ns
    path.write_bytes(bytes(len(LARGE)))
    os.utime(path, ns=(time, time))
    assert downloads.find("models--org--model", [(SHA, len(LARGE))])[0] == [SHA]
    monkeypatch.setattr("skyfab.host.agent.store._started", lambda: 2e9 * 2)
    assert downloads.find("models--org--model", [(SHA, len(LARGE))])[0] == [""]
    assert not path.exists()


def test_a_cut_connection_is_resumed_where_it_was(downloads: Downloads, hub: Hub) -> None:
    hub.cuts["large.bin"] = [100_000, 50_000]
    assert download(downloads, hub, "large.bin", LARGE) == (SHA, "")
    assert [one.range for one in hub.downloads("large.bin")] == ["", "bytes=100000-", "bytes=150000-"]


def test_a_server_that_knows_no_ranges_sends_it_again(downloads: Downloads, hub: Hub) -> None:
    hub.ranges, hub.cuts["large.bin"] = False, [100_000]
    assert download(downloads, hub, "large.bin", LARGE) == (SHA, "")
    assert sum(one.sent for one in hub.downloads("large.bin")) == len(LARGE) + 100_000


@pytest.mark.parametrize("left", [LARGE[:200_000], b"x" * 200_000], ids=["intact", "damaged"])
def test_what_an_earlier_download_has_left_is_continued_or_replaced(
    downloads: Downloads, hub: Hub, left: bytes
) -> None:
    Path(downloads.store).mkdir(parents=True)
    draft_of(downloads).write_bytes(left)
    assert download(downloads, hub, "large.bin", LARGE) == (SHA, "")
    assert hub.downloads("large.bin")[0].range == "bytes=200000-"
    assert stored(downloads) == {SHA: LARGE}


@pytest.mark.parametrize(("path", "data"), [("large.bin", LARGE), ("small.json", SMALL)])
def test_damaged_content_is_refused(downloads: Downloads, hub: Hub, path: str, data: bytes) -> None:
    hub.damaged.add(path)
    assert download(downloads, hub, path, data) == ("", DAMAGED)
    assert set(stored(downloads).values()) == {b""}, "nothing of it is continued"


def test_a_busy_server_is_asked_again_and_another_error_is_told(downloads: Downloads, hub: Hub) -> None:
    hub.statuses["large.bin"] = [503]
    hub.headers["Retry-After"] = "1"
    began = time.monotonic()
    assert download(downloads, hub, "large.bin", LARGE) == (SHA, "")
    assert time.monotonic() - began > 1
    hub.statuses["small.json"] = [404]
    assert download(downloads, hub, "small.json", SMALL) == ("", REFUSED)


def test_a_redirect_that_is_no_url_ends_the_download(downloads: Downloads, hub: Hub) -> None:
    hub.statuses["large.bin"] = [302]
    hub.headers["Location"] = "http://[::1/x"
    assert download(downloads, hub, "large.bin", LARGE) == ("", UNREACHED)


def test_a_server_that_sends_too_little_or_ends(downloads: Downloads, hub: Hub) -> None:
    hub.cuts["large.bin"] = [0] * 2
    assert download(downloads, hub, "large.bin", LARGE) == ("", UNREACHED)
    assert download(downloads, hub, "large.bin", LARGE + b"more", tag="0" * 64)[1] in (REFUSED, DAMAGED)


def test_the_token_is_for_its_server_alone(downloads: Downloads, hub: Hub) -> None:
    hub.repositories["org/model"].gated = True
    assert download(downloads, hub, "large.bin", LARGE) == ("", REFUSED)
    assert download(downloads, hub, "large.bin", LARGE, token=hub.token) == (SHA, "")
    assert download(downloads, hub, "small.json", SMALL, token=hub.token)[1] == "", "the same server, after a redirect"
    assert {one.token for one in hub.asked if one.server == "cdn"} == {""}


def test_two_downloads_of_the_same_content_are_one(downloads: Downloads, hub: Hub, tmp_path: Path) -> None:
    hub.rate = 1e6
    other = Downloads(str(tmp_path / "cache"))
    found: list[tuple[str, str]] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(download(one, hub, "large.bin", LARGE)))  # type: ignore[misc]
        for one in (downloads, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(SHA, "")] * 2
    assert len(hub.downloads("large.bin")) == 1


def test_a_draft_that_another_process_has_written_to_is_not_taken(downloads: Downloads, hub: Hub) -> None:
    """Its content is hashed as it arrives: where locks do not work, the file may have more."""
    hub.rate = 3e5

    def write() -> None:
        until(lambda: hub.asked)
        with draft_of(downloads).open("ab") as file:
            file.write(b"x" * 1000)

    other = threading.Thread(target=write)
    other.start()
    assert download(downloads, hub, "large.bin", LARGE) == ("", DAMAGED)
    other.join()
    assert download(downloads, hub, "large.bin", LARGE) == (SHA, "")
    assert stored(downloads) == {SHA: LARGE}


def test_hosts_that_share_a_store_have_drafts_of_their_own(
    downloads: Downloads, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their locks may not be known to each other, and gc must know the names."""
    monkeypatch.setattr(socket, "gethostname", lambda: "other-node.example")
    hub.cuts["large.bin"] = [100_000] + [0] * 9
    assert download(downloads, hub, "large.bin", LARGE) == ("", UNREACHED)
    monkeypatch.undo()
    (draft,) = stored(downloads)
    assert re.fullmatch(_DRAFT, draft) and draft != draft_of(downloads).name
    hub.cuts.clear()
    assert download(downloads, hub, "large.bin", LARGE) == (SHA, "")
    assert set(stored(downloads)) == {SHA, draft}


def test_what_is_laid_out_is_found_and_on_the_disk_once(downloads: Downloads, hub: Hub) -> None:
    names = [download(downloads, hub, "large.bin", LARGE)[0], download(downloads, hub, "small.json", SMALL)[0]]
    files = [("large.bin", SHA, names[0]), ("in/small.json", git_hash(SMALL), names[1])]
    folder = Path(downloads.lay_out("models--org--model", COMMIT, "main", files))
    assert (folder / "large.bin").read_bytes() == LARGE
    assert (folder / "in/small.json").readlink() == Path("../../../blobs", git_hash(SMALL))
    assert (folder / "../../refs/main").read_text() == COMMIT
    assert Path(downloads.store, SHA).samefile(folder / "large.bin")
    assert downloads.lay_out("models--org--model", COMMIT, "main", files) == str(folder), "again"
    for path in Path(downloads.store).iterdir():
        path.unlink()
    asked = [(SHA, len(LARGE)), (git_hash(SMALL), len(SMALL)), ("0" * 64, 5), ("0" * 40, 5)]
    found, room = downloads.find("models--org--model", asked)
    assert found == [*names, "", ""]
    assert room > 0
    assert stored(downloads) == {names[0]: LARGE, names[1]: SMALL}, "linked back"
    assert not list(folder.parents[1].rglob(".*")), "no drafts are left"


def test_a_small_file_that_another_host_has_changed_is_refused(downloads: Downloads) -> None:
    lie = b"a lie"
    name = hashlib.sha256(lie).hexdigest()
    Path(downloads.store).mkdir(parents=True)
    Path(downloads.store, name).write_bytes(lie)
    with pytest.raises(OSError, match=r"config.json does not match the hub"):
        downloads.lay_out("models--org--model", COMMIT, "main", [("config.json", git_hash(SMALL), name)])


def test_the_variable_of_the_cache(tmp_path: Path) -> None:
    assert variables(str(tmp_path), {}) == {}
    (tmp_path / "hub").mkdir()
    assert variables(str(tmp_path), {}) == {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert variables(str(tmp_path), {"HF_HOME": "/x"}) == {}
    assert variables(str(tmp_path), {"HF_HUB_CACHE": "/x"}) == {}
