"""What hosts report of written files, how it is shown, and the command that copies them."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

import skyfab as sky
from skyfab._util import schema
from skyfab.detached.written import Written, current_folder, parse, project, to_fetch


def test_the_command_that_fetches_goes_through_the_same_door() -> None:
    host = sky.Host(name="n", address="10.0.0.5", port=2222, user="ada", identity="/k/my key", jump="gate,bob@x:1")
    known = sky.Inventory(hosts={"gate": sky.Host(name="gate", address="g.example", user="eve", port=22)})
    assert to_fetch(host, known, "p-1") == (
        "scp -r -P 2222 -i '/k/my key' -J eve@g.example:22,bob@x:1 ada@10.0.0.5:.cache/skyfab/files/p-1 ./n"
    )
    assert to_fetch(sky.Host(name="n", address="::1", cache="/c"), known, "/d/$x") == "scp -r '[::1]:/d/$x' ./n"


def test_a_host_that_skyfab_finds_by_its_name_is_asked_by_skyfab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the working folder that `get` has in this folder, and else by the whole path."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "my hosts.toml"
    place.write_text('[hosts.node1]\naddress = "10.0.0.5"\n[hosts.node2]\nworkdir = "/scratch"\n')
    known = sky.Inventory.of(place)
    node1, node2 = known.select("node1,node2")
    given = f"skyfab get '--inventory={place}'"
    here, tail = project(str(tmp_path)), "--hosts=node1 --to=node1"
    assert to_fetch(node1, known, here, "a b.pt") == f"{given} 'a b.pt' {tail}"
    assert to_fetch(node1, known, "other-1", "a.pt") == f"{given} '~/.cache/skyfab/files/other-1/a.pt' {tail}"
    assert to_fetch(node1, known, "/data") == f"{given} /data {tail}"
    assert to_fetch(node2, known, "/scratch", "a.pt") == f"{given} a.pt --hosts=node2 --to=node2"
    monkeypatch.setenv("SKYFAB_INVENTORY", str(place))
    assert to_fetch(node1, known, here) == f"skyfab get . {tail}"
    alone = sky.Inventory(hosts={})
    (ad_hoc,) = alone.select("ada@10.0.0.5:2222")
    assert to_fetch(ad_hoc, alone, here).startswith("skyfab get . --hosts=ada@10.0.0.5:2222 ")


@pytest.mark.parametrize(
    ("common", "complete", "inner"),
    [
        ("a.pt", True, "a.pt"),
        ("ckpt", True, "ckpt"),
        ("", True, "."),
        ("a", False, "."),
        ("-odd", True, "."),
        ("a\x1b[2J", True, "."),
        ("x" * 199, True, "x" * 199),
        ("x" * 200, True, "."),
        ("~ada", True, "."),
        ("/etc/passwd", True, "."),
        ("../../etc/passwd", True, "."),
    ],
)
def test_what_is_fetched_is_what_was_written(common: str, complete: bool, inner: str) -> None:
    (found,) = parse([{"workdir": "p", "count": 9, "size": 3, "names": [], "complete": complete, "common": common}])
    assert found.inner == inner


def test_what_a_host_says_of_files_is_not_believed() -> None:
    good = {"workdir": "p", "count": 2, "size": 3, "names": ["a", "b"], "complete": True}
    assert parse([good]) == (Written("p", 2, 3, ("a", "b"), True),)
    for bad in (None, 3, {}, [None], [{}], [{**good, "count": "x"}], [{**good, "names": 1}]):
        with pytest.raises(schema.Invalid):
            parse(bad)
    (one,) = parse([{**good, "count": 9, "names": ["x" * 1000, "a\n  to fetch: rm", "y", "z"]}])
    assert str(one) == f"9 files (3 bytes): {'x' * 80}, a   to fetch: rm, y, …", "one line, whatever the host says"


def test_the_folder_of_a_project_is_readable_and_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [project(folder) for folder in ("/a/my project!", "/b/my project!", "/a/" + "x" * 60, "/", "/a/---")]
    assert [name.rpartition("-")[0] for name in names] == ["my-project", "my-project", "x" * 40, "project", "project"]
    assert {len(name.rpartition("-")[2]) for name in names} == {8}
    assert len({*names}) == 5 and project("/a/my project!") == names[0]
    monkeypatch.setattr(getpass, "getuser", lambda: "another")
    assert project("/a/my project!") != names[0], "two users may have the same folder"

    def nobody() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    first = project("/a")
    monkeypatch.setattr(os, "getuid", lambda: 12346)
    assert project("/a") != first


def test_a_current_folder_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert current_folder() == str(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert current_folder() == ""
