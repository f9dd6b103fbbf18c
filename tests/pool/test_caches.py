"""What a hostile host says of its cache is refused, or concerns that host alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import skyfab as sky
from skyfab.files.transfer import Ready
from skyfab.pool.fetch import Cache
from skyfab.pool.hub import Found, HubFile

LARGE = HubFile("large.bin", "a" * 64, 10, "https://hub/large.bin")
SMALL = HubFile("config.json", "b" * 40, 5, "https://hub/config.json")
FOUND = Found(files=(LARGE, SMALL), shown="org/model")


class Says:
    """In place of a host: gives the same reply to everything but the start of a download."""

    def __init__(self, reply: object) -> None:
        self._reply = reply

    def ask(self, request: str, *_: object) -> Ready:
        return Ready(None if request == "begin" else self._reply)


def cache(reply: object) -> Cache:
    made = Cache(None, None, threading.Event())
    made._asked = Says(reply)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [["a" * 64, ""], "much"],
        [["a" * 64], 100],
        [["c" * 64, ""], 100],
        [["a" * 64, "../../x"], 100],
        [["a" * 64, "b" * 40], 100],
        [[7, ""], 100],
    ],
)
def test_what_it_has(reply: object) -> None:
    with pytest.raises(sky.ProtocolError, match="invalid reply to find"):
        cache(reply).find("models--org--model", FOUND.files)


def test_what_it_has_and_how_much_fits() -> None:
    assert cache([["a" * 64, "d" * 64], 0]).find("x", FOUND.files) == ["a" * 64, "d" * 64]
    assert cache([["a" * 64, ""], 5]).find("x", FOUND.files) == ["a" * 64, ""]
    with pytest.raises(sky.HostUnfit, match="they need 15 bytes, 14 bytes is free"):
        cache([["", ""], 14]).find("x", FOUND.files)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (None, sky.ProtocolError),
        (["1", "", "", ""], sky.ProtocolError),
        ([10, "c" * 64, "", ""], sky.Unreachable),
        ([10, "a" * 63, "", ""], sky.Unreachable),
        ([10, "", "nothing known", "\x1b[2J"], sky.Unreachable),
        ([10, "", "refused", "403"], sky.UsageError),
        ([10, "", "refused", "404"], sky.SkyfabError),
        ([10, "", "damaged", ""], sky.SkyfabError),
    ],
)
def test_what_it_downloads(reply: object, error: Any) -> None:
    with pytest.raises(error) as failed:
        cache(reply).download(LARGE, FOUND, lambda done: None)
    assert str(failed.value).isprintable() or "hint:" in str(failed.value)


def test_progress_stays_within_the_file() -> None:
    seen: list[int] = []
    for done in (-5, 10**18):
        assert cache([done, "a" * 64, "", ""]).download(LARGE, FOUND, seen.append) == "a" * 64
    assert seen == [0, 10]


@pytest.mark.parametrize("reply", [None, [200, "", 5], ["200", "", 5, b""], [200, "", 5, "text"]])
def test_what_it_has_seen_of_a_server(reply: object) -> None:
    status, why, _, body = cache(reply).page("https://hub", "", 100)
    assert (status, body) == (0, b"")
    assert "invalid reply to page" in why
