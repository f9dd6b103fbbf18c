"""Sources of hosts: recognized by word and by content, written as TOML that reads back equal, never anything but an
InventoryError."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyfab.errors import InventoryError
from skyfab.inventory.host import LOCAL, Host
from skyfab.inventory.inventory import Inventory, source_of

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGifrC2TEtlDqvu01rFE2MKRF/J8lbSByLau0+8Ie1SJ"


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("x.toml", "anything", "toml"),
        ("x.yml", "anything", "ansible"),
        ("x.yaml", "", "ansible"),
        ("x.json", "{}", "ansible"),
        ("x.ini", "a", "ansible"),
        ("x", "[hosts.a]\nport = 22", "toml"),
        ("x", "[hosts.a]\nport = = 22", "toml"),
        ("x", "[groups]\na = []", "toml"),
        ("x", "[hosts]\nnode1\n", "ansible"),
        ("x", "[web]\nnode1\n", "ansible"),
        ("x", "node1 ansible_host=10.0.0.1", "ansible"),
        ("x", "---\nall:\n", "ansible"),
        ("x", "all:\n  hosts:\n", "ansible"),
        ("x", "node1\nnode2\n", "hostfile"),
        ("x", "node1 slots=4", "hostfile"),
        ("x", "node1:4\nnode2 slots = 4", "hostfile"),
        ("x", "complete nonsense", "hostfile"),
    ],
)
def test_a_file_is_recognized_by_its_name_and_content(name: str, text: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert source_of(tmp_path / name).word == kind


def test_what_may_be_slots_or_a_port_has_to_be_said(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("node1:4\n")
    with pytest.raises(InventoryError) as caught:
        Inventory.of(path)
    assert "is the number the host's slots (MPI) or its port (Ansible)?" in caught.value.message
    assert caught.value.hint == f"write hostfile:{path} or ansible:{path}"
    assert Inventory.of(f"hostfile:{path}").hosts["node1"].slots == 4
    assert Inventory.of(f"ansible:{path}").hosts["node1"].port == 4
    assert str(Inventory.of(f"ansible:{path}").source) == f"ansible:{path}"


def test_every_word_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text("Host gpu1 web1\n")
    monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(config))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "s[1-2]")
    assert list(Inventory.of("ssh_config").hosts) == ["gpu1", "web1"]
    assert list(Inventory.of("ssh_config:gpu*").hosts) == ["gpu1"]
    assert str(Inventory.of("ssh_config:gpu*").source) == "ssh_config:gpu*"
    assert list(Inventory.of("slurm").hosts) == ["s1", "s2"]


def test_a_path_with_a_slash_is_a_file_even_if_it_is_called_like_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slurm").write_text("node1 slots=2\n")
    assert Inventory.of("./slurm").hosts["node1"].slots == 2
    assert Inventory.of(Path("slurm")).hosts["node1"].slots == 2


def test_the_variable_may_name_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYFAB_INVENTORY", "slurm")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "s[1-2]")
    inventory = Inventory.find()
    assert list(inventory.hosts) == ["s1", "s2"]
    assert inventory.is_found
    assert not Inventory.parse("[hosts.a]", "inventory.toml").is_found
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert not inventory.is_found, "commands name it"


@pytest.mark.parametrize("name", ["x.toml", "x", "x.yml", "x.ini"])
def test_a_file_that_cannot_be_read_is_one_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(InventoryError, match="No such file"):
        Inventory.of(path)
    path.write_bytes(b"\x7fELF\0\xff")
    with pytest.raises(InventoryError, match="not a text file"):
        Inventory.of(path)
    path.write_bytes(b"a\0b")
    with pytest.raises(InventoryError, match="contains NUL bytes"):
        Inventory.of(path)


# to_toml

NAMES = st.text("abcä09_.+-", min_size=1, max_size=5).map("n".__add__)
LINES = st.text("ab\n\r\t\b\x01\x1f\x7f\x85\u2028😀'\"\\#=[]{}ä ", max_size=12)
SHOWN = st.text(string.ascii_letters + "äß \"'\\#[]{}=,.$", min_size=1, max_size=12).map("/".__add__)
HOSTS = st.fixed_dictionaries(
    {},
    optional={
        "port": st.integers(1, 65535),
        "user": st.text("abc.-", max_size=4).map(lambda text: f"u{text}x"),
        "identity": SHOWN,
        "jump": st.sampled_from(["none", "gate.example", "ada@10.9.9.9:22,[fe80::1]:23"]),
        "host_key": st.just(KEY),
        "python": st.sampled_from(["3.11", "/opt/python"]),
        "gpus": st.lists(st.integers(0, 9), unique=True, max_size=3).map(tuple),
        "slots": st.integers(1, 99),
        "cache": SHOWN,
        "workdir": st.sampled_from(["temp", "~/x y"]),
        "setup": LINES,
        "container": st.sampled_from(["dev", "a1_b.c-d"]),
        "transport": st.sampled_from(["openssh", "fabric", "local"]),
        "interface": st.just("ib0"),
        "tags": st.lists(st.sampled_from(["x", "a100", "ä"]), max_size=2).map(tuple),
        "env": st.dictionaries(
            st.text("AZ_09", max_size=4).map("A".__add__),
            LINES,
            max_size=2,
        ),
    },
)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique_by=str.casefold))
    hosts = {
        name: Host(
            name=name, address=draw(st.sampled_from([None, f"10.0.0.{number}", f"fe80::{number}"])), **draw(HOSTS)
        )
        for number, name in enumerate(names, 1)
    }
    if draw(st.booleans()):
        hosts["local"] = LOCAL
    groups = draw(
        st.dictionaries(
            NAMES.filter(lambda name: name not in hosts),
            st.lists(st.sampled_from([*hosts, "local"]), unique=True).map(tuple),
            max_size=3,
        )
    )
    return Inventory(hosts=hosts, groups=groups)


@settings(database=None, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(inventories())
def test_what_is_written_reads_back_equal(inventory: Inventory) -> None:
    text = inventory.to_toml()
    again = Inventory.parse(text)
    assert again == inventory
    assert list(again.hosts) == list(inventory.hosts)
    assert again.to_toml() == text


def test_what_is_written_is_short_and_quoted_where_it_must_be() -> None:
    text = """
[defaults]
user = "ada"
[hosts."node[1-2].x"]
address = "10.0.0.[1-2]"
env = { A = "it's \\"\\t" }
[hosts.b]
gpus = []
[groups]
g = ["all", "!b"]
"""
    assert (
        Inventory.parse(text).to_toml()
        == """\
[hosts."node1.x"]
address = "10.0.0.1"
user = "ada"
env = { A = "it's \\"\\t" }

[hosts."node2.x"]
address = "10.0.0.2"
user = "ada"
env = { A = "it's \\"\\t" }

[hosts.b]
user = "ada"
gpus = []

[groups]
g = ["node1.x", "node2.x"]
"""
    )


# Whatever a file has in it

WORDS = "[web] [hosts.a] node[1-4] node1 address= = slots=4 node1:4 : ' \" # ; \\ ! * é \x01 [1:999999999] port=9 {"
PIECES = st.sampled_from(
    [
        *WORDS.split(" "),
        "{{ x }}",
        "\n",
        "\n  ",
        "\t",
        " ",
        "Host ",
        "Include ",
        "Match ",
        "ProxyJump x",
        "\u2028",
        "[" * 50,
    ]
)


@settings(database=None, deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(text=st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join))
def test_any_text_is_hosts_or_one_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    for source in (path, f"hostfile:{path}", "ssh_config"):
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SKYFAB_SSH_CONFIG", str(path))
                inventory = Inventory.of(source)
        except InventoryError:
            continue
        assert inventory.select()
        assert Inventory.parse(inventory.to_toml()) == inventory
