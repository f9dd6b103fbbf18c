"""Hosts of ssh_config: which of its words are aliases, what it includes, and what is left out or a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyfab.errors import InventoryError, UnknownHost
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory


def aliases(text: str, folder: Path, pattern: str = "*") -> list[str]:
    path = folder / "config"
    path.write_bytes(text.encode())
    return list(read(path, pattern).hosts)


def read(path: Path, pattern: str = "*") -> Inventory:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYFAB_SSH_CONFIG", str(path))
        return Inventory.of(f"ssh_config:{pattern}")


ENTRIES = {
    "plain": ("Host a", ["a"]),
    "upper case": ("HOST a", ["a"]),
    "equals with spaces": ("Host = a b", ["a", "b"]),
    "keyword in quotes": ('"Host" a', ["a"]),
    "parts in quotes": ('Host a"b"c', ["abc"]),
    "comment after": ("Host a # b", ["a"]),
    "no comment inside": ("Host a\nHost b#c", ["a"]),
    "CRLF": ("Host a\r\n  User x\r\nHost b\r\n", ["a", "b"]),
    "star": ("Host * a", ["a"]),
    "pattern inside": ("Host a b*c", ["a"]),
    "negated pattern": ("Host a b !b*", ["a"]),
    "only negated": ("Host !b\nHost a", ["a"]),
    "Match host": ("Match host b\n  User x\nHost a", ["a"]),
    "Match exec": ("Match exec true\nHost a", ["a"]),
    "tokens": ("Host a\n  HostName %h.example.com\n  ControlPath ~/%C", ["a"]),
    "other letters": ("Host knödel", ["knödel"]),
    "a user is left out": ("Host ada@x a", ["a"]),
    "an option is left out": ("Host -oProxyCommand=x a", ["a"]),
    "words of selections are left out": ("Host all none local a", ["a"]),
    "git is left out": ("Host github.com\n  User git\nHost a", ["a"]),
    "git after another user": ("Host a\n  User ada\nHost *\n  User git\nHost b\n  User x", ["a"]),
    "git of a negated pattern": ("Host * !a\n  User git\nHost a b", ["a"]),
    "git in a Match": ("Host a b\nMatch host b\n  User git", ["a"]),
    "two names of one account": ("Host a a.lab\n  HostName 10.0.0.5\nHost b\n  HostName 10.0.0.5", ["a"]),
    "two ports of one address": ("Host a\n  Port 1\nHost b\n  Port 2\nHost *\n  HostName 10.0.0.5", ["a", "b"]),
    "two users of one machine": ("Host a\n  User ada\nHost a b\n  HostName 10.0.0.5", ["a", "b"]),
    "one address in two networks": (
        "Host a\n  ProxyCommand nc gate1 %h\nHost b\n  ProxyCommand nc gate2 %h\nHost *\n  HostName 10.0.0.5",
        ["a", "b"],
    ),
    "an alias of an alias": ("Host a\nHost b\n  HostName a", ["a"]),
    "addresses made of names": ("Host a b\n  HostName %h.lab", ["a", "b"]),
    "jump hosts": ("Host a\n  ProxyJump b\nHost b\n  ProxyJump ada@c:22,d\nHost *\n  ProxyJump none", ["a", "b"]),
    "jumps in a circle": ("Host b\n  ProxyJump ada@c:22,d\nHost c\n  ProxyJump ssh://b\nHost a", ["a"]),
}


@pytest.mark.parametrize(("text", "expected"), ENTRIES.values(), ids=ENTRIES)
def test_an_entry_has_these_aliases(text: str, expected: list[str], tmp_path: Path) -> None:
    assert aliases(text, tmp_path) == expected


def test_a_host_has_the_alias_as_its_name_and_leaves_the_rest_to_ssh(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("Host gpu\n  HostName 10.0.0.5\n  Port 2222\n  User ada\n  ProxyJump gate\n")
    assert read(path).hosts == {"gpu": Host(name="gpu")}


def test_what_is_left_out_is_said_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("Host github.com\n  User git\nHost a all x@y\nHost b\n  HostName a")
    left_out = read(path).left_out
    assert left_out == {
        "github.com": '"User git" is a Git server',
        "all": "reserved in selections",
        "x@y": "not a valid host name: use letters, digits, '.', '_', '+' and '-', and start with a letter or digit",
        "b": "same login as a",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Host a b\n  HostName x\n  ProxyCommand connect %n", ["a", "b"]),
        ("Host a b\n  HostName x\n  ProxyJump %n-gate", ["a", "b"]),
        ("Match originalhost b\n  Port 2222\nHost a b\n  HostName x", ["a", "b"]),
        ("Match exec true\n  ForwardAgent no\nHost a b\n  HostName x", ["a"]),
        ("Host a\n  HostName x\n  Port 2222\nHost b\n  HostName x", ["a", "b"]),
        ("Host a\n  HostName x\nHost b\n  HostName X\n  Port 22\n  ProxyJump none", ["a"]),
    ],
)
def test_only_aliases_that_are_certainly_one_machine_are_one_host(
    text: str, expected: list[str], tmp_path: Path
) -> None:
    assert aliases(text, tmp_path) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", ["gpu1", "gpu2", "web"]),
        ("gpu*", ["gpu1", "gpu2"]),
        ("gpu?,!gpu2", ["gpu1"]),
        ("!gpu1", ["gpu2", "web"]),
        ("web, gpu1", ["gpu1", "web"]),
    ],
)
def test_a_pattern_chooses_aliases(pattern: str, expected: list[str], tmp_path: Path) -> None:
    assert aliases("Host gpu1 gpu2\nHost web", tmp_path, pattern) == expected


def test_a_pattern_that_fits_nothing_is_an_error_that_names_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="has no hosts") as caught:
        aliases("Host gpu1 web", tmp_path, "gpu2")
    assert caught.value.hint == "did you mean gpu1?"
    with pytest.raises(InventoryError) as caught:
        aliases("Host gpu1 web", tmp_path, "zzz")
    assert caught.value.hint == "its aliases are gpu1, web"
    with pytest.raises(InventoryError) as caught:
        aliases("Host *", tmp_path)
    assert "Host node1" in str(caught.value.hint)


# Include


def test_includes_are_read_where_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Globs in order, quotes, tokens and variables; a missing file is skipped."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "2.conf").write_text("Host two")
    (tmp_path / "d" / "1.conf").write_text("Host one")
    (tmp_path / "with space").write_text("Host three")
    (tmp_path / "env").write_text("Host four")
    monkeypatch.setenv("HERE", str(tmp_path))
    include = f'Include {tmp_path}/d/*.conf "{tmp_path}/with space" ${{HERE}}/env {tmp_path}/missing'
    assert aliases(f"Host a\nMatch all\n{include}\nHost b", tmp_path) == ["a", "one", "two", "three", "four", "b"]


def test_a_relative_include_is_one_of_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name in ("rel", "tilde", "token"):
        (tmp_path / ".ssh" / name).write_text(f"Host {name}")
    assert aliases("Include rel ~/.ssh/tilde %d/.ssh/token", tmp_path) == ["rel", "tilde", "token"]


def test_the_users_file_comes_before_the_systems_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SKYFAB_SSH_CONFIG")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host mine")
    assert next(iter(Inventory.of("ssh_config").hosts)) == "mine"
    (tmp_path / "other").write_text("Host other")
    monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(tmp_path / "other"))
    assert list(Inventory.of("ssh_config").hosts) == ["other"]


def test_a_file_that_includes_itself_is_read_once(tmp_path: Path) -> None:
    """ssh reports it; so only the names are read, and not the hosts."""
    config = tmp_path / "config"
    (tmp_path / "b").write_text(f"Include {config}\nHost b")
    config.write_text(f"Host a\nInclude {tmp_path}/b")
    with pytest.raises(InventoryError, match="Too many recursive configuration includes"):
        read(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Frobnicate yes\nHost a", "line 1: Bad configuration option: frobnicate"),
        ("Host a\n  Compression", "line 2: "),
        ('Host a\nHost "b', "line 2: "),
    ],
)
def test_what_ssh_rejects_is_reported_in_its_words(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InventoryError) as caught:
        aliases(text, tmp_path)
    assert caught.value.message.startswith(f"ssh rejects its configuration: {tmp_path}/config")
    assert message in caught.value.message
    assert caught.value.hint == "ssh -G a"


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="No such file"):
        read(tmp_path / "missing")


# Beside an inventory file


def test_an_alias_can_be_selected_beside_an_inventory_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text("Host box gate*\n")
    monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(config))
    inventory = Inventory.parse("[hosts.node1]", "inv.toml")
    assert inventory.select("box,node1") == (Host(name="box"), Host(name="node1"))
    for word in ("nod1", "gate1", "bx", "gate*"):
        with pytest.raises(UnknownHost, match=r"inv.toml: no host, group or tag matches"):
            inventory.select(word)
    with pytest.raises(UnknownHost) as caught:
        inventory.select("nod1")
    assert caught.value.hint == "did you mean node1?"


def test_an_ssh_config_with_mistakes_has_no_aliases_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh reports them, and so does reading the aliases."""
    config = tmp_path / "config"
    config.write_text('Host box\nHost "x\n')
    monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(config))
    inventory = Inventory.parse("[hosts.node1]", "inv.toml")
    with pytest.raises(UnknownHost):
        inventory.select("bo")
    config.unlink()
    with pytest.raises(UnknownHost):
        inventory.select("box")
