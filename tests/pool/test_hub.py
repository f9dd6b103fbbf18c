"""What a hub says is checked before anything else happens with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage.hub import COMMIT, Hub, git_hash

import skyfab as sky
from skyfab.host.download import Downloads
from skyfab.pool.hub import Found, find

FILES = {"config.json": b"{}", "a/weights.bin": b"w" * 200_000, "a/b.txt": b""}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        made.add("org/model", dict(FILES))
        made.add("datasets/org/numbers", dict(FILES))
        yield made


def look(source: str) -> Found:
    side = Downloads("/nowhere")
    return find(source, lambda url, token, most: side.page(url, token, min(most, 1 << 20)))


def test_a_model_and_a_data_set(hub: Hub) -> None:
    found = look("hf://org/model")
    assert (found.repository, found.commit, found.revision, found.token) == ("models--org--model", COMMIT, "main", "")
    assert {file.path: file.size for file in found.files} == {path: len(data) for path, data in FILES.items()}
    assert found.files[0].url == f"{hub.url}/org/model/resolve/{COMMIT}/config.json"
    assert found.files[0].tag == git_hash(b"{}")
    other = look("hf://datasets/org/numbers@v1/x")
    assert (other.repository, other.revision) == ("datasets--org--numbers", "v1/x")
    assert other.files[0].url == f"{hub.url}/datasets/org/numbers/resolve/{COMMIT}/config.json"


def test_patterns(hub: Hub) -> None:
    found = look("hf://org/model")

    def kept(*include: str, exclude: tuple[str, ...] = ()) -> list[str]:
        return [file.path for file in found.matching(include, exclude).files]

    assert kept("*.json") == ["config.json"]
    assert kept("a/") == ["a/weights.bin", "a/b.txt"]
    assert kept(exclude=("*.bin", "*.txt")) == ["config.json"]
    with pytest.raises(sky.UsageError, match=r"no file matches\nhint: available: config.json, a/weights.bin"):
        kept("*.pt")


def test_what_cannot_be_fetched(hub: Hub) -> None:
    for source, says in {
        "org/model": "cannot fetch org/model",
        "hf://a/b/c": "invalid model name",
        "hf://../model": "invalid model name",
        "hf://org/model@../../x": "invalid revision",
        "https://host/file.bin": "hint: write https://host/file.bin#sha256=HEX",
        "https://host/file.bin#sha256=abc": "'abc' is not a sha256",
        f"https://host/..%2F..%2F..#sha256={'0' * 64}": "does not end with a file name",
        f"https://ada:pw@host/x#sha256={'0' * 64}": "the URL contains a user name or password",
        "hf://org/model@v9": "org/model has no revision v9",
        "hf://org/modle": "the hub has no model org/modle\nhint: if it is private, set HF_TOKEN",
        "hf://org/unknown-thing": "hint: if it is private, set HF_TOKEN",
    }.items():
        with pytest.raises(sky.UsageError) as failed:
            look(source)
        assert says in str(failed.value), source
        assert "pw" not in str(failed.value)


def entry(**changes: Any) -> dict[str, Any]:
    return {"rfilename": "x", "size": 2, "blobId": "0" * 40, **changes}


PATHS = ("", "/etc/passwd", "../x", "a/../../x", "a//b", ".", "a/", "a\0b", "\x1b[2J", "n" * 256, 7, "\ud800")
"""What is no path inside of a repository."""


def test_hostile_lists_are_refused(hub: Hub) -> None:
    for bad in (
        *(entry(rfilename=path) for path in PATHS),
        *(entry(rfilename=path) for path in ("config.json", "config.json/x", "a")),  # which is there
        *(entry(blobId=name) for name in ("../../../etc", None)),
        *(entry(size=size) for size in (-1, 1 << 60, "2")),
        *(entry(lfs=large) for large in ({"sha256": "0" * 40, "size": 2}, {"sha256": "0" * 64, "size": -2}, "x")),
        "x",
    ):
        hub.repositories["org/model"].extra = [bad]
        with pytest.raises(sky.SkyfabError, match="invalid file list of org/model"):
            pytest.fail(f"accepted {bad}: {look('hf://org/model')}")


def test_a_commit_that_is_none_is_refused(hub: Hub) -> None:
    for commit in ("main", "../../x", "", 7):
        hub.repositories["org/model"].commit = commit  # type: ignore[assignment]
        with pytest.raises(sky.SkyfabError, match="invalid file list of org/model"):
            pytest.fail(f"accepted {commit!r}: {look('hf://org/model')}")


def test_a_list_without_end_is_cut(hub: Hub) -> None:
    hub.repositories["org/model"].extra = [entry(rfilename=f"{number}") for number in range(20_000)]
    with pytest.raises(sky.SkyfabError, match="not JSON, or too long"):
        look("hf://org/model")


def test_gated_and_private(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.repositories["org/model"].private = True
    with pytest.raises(sky.UsageError, match="the hub has no model org/model"):
        look("hf://org/model")
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "token").write_text(f"{hub.token}\n")
    found = look("hf://org/model")
    assert found.token == hub.token
    assert hub.token not in repr(found)
    hub.repositories["org/model"].private = False
    assert look("hf://org/model").token == "", "whoever sends no token gets it"
    hub.repositories["org/model"].gated = True
    assert look("hf://org/model").token == hub.token
    monkeypatch.setenv("HF_TOKEN", "hf_other\nx")
    with pytest.raises(sky.UsageError, match="invalid Hugging Face token"):
        look("hf://org/model")


def test_a_file_of_another_server(hub: Hub) -> None:
    url = f"{hub.cdn.url}/org/model/-/a/weights.bin"
    found = look(f"{url}#sha256={'0' * 64}")
    assert [(file.path, file.size, file.url) for file in found.files] == [("weights.bin", 200_000, url)]
    assert not found.repository
    assert sum(one.sent for one in hub.asked) == 0, "only its size was asked for"
    with pytest.raises(sky.SkyfabError, match="HTTP 404"):
        look(f"{url}x#sha256={'0' * 64}")
