"""Inventories: what a file means, how hosts are selected, and that every mistake is one clear error."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.host import LOCAL, Address, Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.selection import expand, split

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGifrC2TEtlDqvu01rFE2MKRF/J8lbSByLau0+8Ie1SJ"
EXAMPLE = Path(__file__).parents[2] / "inventory.example.toml"

CLUSTER = """
[defaults]
user = "ada"

[hosts."node[1-4]"]
address = "10.0.0.[11-14]"
tags = ["a100"]

[hosts.web1]
address = "10.0.1.1"
tags = ["front", "node1"]

[hosts.web2]
address = "fe80::2"
port = 2222

[groups]
gpu = ["node[1-3]"]
front = ["web2"]
everything = ["gpu", "web*", "node4"]
most = ["!node3"]
nobody = []
"""


@pytest.fixture(scope="module")
def cluster() -> Inventory:
    return Inventory.parse(CLUSTER, "cluster.toml")


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


def mistake(text: str) -> InventoryError:
    """The error of an inventory that must have one."""
    with pytest.raises(InventoryError) as caught:
        Inventory.parse(text, "inv.toml")
    return caught.value


def without_line(error: InventoryError) -> str:
    """The message, without the number of the line."""
    return re.sub(r"^inv\.toml:\d+: ", "inv.toml: ", error.message)


# What a file means


def test_the_example_that_users_copy_loads_and_means_what_its_comments_say() -> None:
    inventory = Inventory.of(EXAMPLE)
    assert list(inventory.hosts) == ["gateway", "node1", "node2", "node3", "node4", "workstation"]
    assert inventory.groups == {"gpu": ("node1", "node2", "node3", "node4"), "small": ("workstation",)}
    assert inventory.hosts["node3"].address == "10.0.0.13"
    assert inventory.hosts["node3"].env == {"OMP_NUM_THREADS": "8", "NCCL_DEBUG": "WARN"}
    assert inventory.hosts["workstation"].destination == "workstation"
    assert [hop.login for hop in inventory.jump_chain(inventory.hosts["node1"])] == ["ada@gateway.example.com:2222"]


def test_the_example_shows_every_key_of_a_host() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for field in dataclasses.fields(Host):
        assert field.name == "name" or f"{field.name} = " in text


def test_every_key_reaches_its_host() -> None:
    text = f"""
    [hosts.a]
    address = "10.0.0.1"
    port = 2222
    user = "ada"
    identity = "~/key file"
    jump = "gw, ssh://root@gw2:23"
    host_key = "{KEY} root@a"
    python = "3.11"
    gpus = [0, 1]
    slots = 4
    cache = "/scratch/with space"
    transport = "openssh"
    interface = "ib0"
    tags = ["x", "y"]
    env = {{ A = "1" }}
    """
    assert Inventory.parse(text).hosts["a"] == Host(
        name="a",
        address="10.0.0.1",
        port=2222,
        user="ada",
        identity=str(Path("~/key file").expanduser()),
        jump="gw,root@gw2:23",
        host_key=KEY,
        python="3.11",
        gpus=(0, 1),
        slots=4,
        cache="/scratch/with space",
        transport="openssh",
        interface="ib0",
        tags=("x", "y"),
        env={"A": "1"},
    )


def test_defaults_fill_in_and_variables_are_joined_one_by_one() -> None:
    inventory = Inventory.parse(
        """
        [defaults]
        user = "ada"
        slots = 2
        tags = ["all-of-them"]
        env = { A = "1", B = "1" }
        [hosts.a]
        [hosts.b]
        user = "bob"
        tags = ["mine"]
        env = { B = "2", C = "2" }
        """
    )
    a, b = inventory.hosts.values()
    assert (a.user, a.slots, a.tags, a.env) == ("ada", 2, ("all-of-them",), {"A": "1", "B": "1"})
    assert (b.user, b.slots, b.tags, b.env) == ("bob", 2, ("mine",), {"A": "1", "B": "2", "C": "2"})


def test_a_name_may_be_a_range_whose_addresses_count_in_step() -> None:
    inventory = Inventory.parse('[hosts."node[08-10]"]\naddress = "10.0.0.[8-10]"')
    assert {host.name: host.address for host in inventory.hosts.values()} == {
        "node08": "10.0.0.8",
        "node09": "10.0.0.9",
        "node10": "10.0.0.10",
    }


def test_groups_keep_their_order_and_resolve_groups_patterns_tags_and_exclusions(cluster: Inventory) -> None:
    assert cluster.groups["everything"] == ("node1", "node2", "node3", "web1", "web2", "node4")
    assert cluster.groups["most"] == ("node1", "node2", "node4", "web1", "web2")
    assert list(cluster.groups) == ["gpu", "front", "everything", "most", "nobody"]


def test_a_group_may_have_this_machine() -> None:
    inventory = Inventory.parse('[hosts.a]\n[groups]\nboth = ["local", "a"]')
    assert inventory.select("both") == (LOCAL, inventory.hosts["a"])


def test_local_may_be_declared_and_never_gets_what_is_for_ssh() -> None:
    inventory = Inventory.parse(
        '[defaults]\nuser = "ada"\njump = "gw"\ntransport = "openssh"\n[hosts.local]\nslots = 3\nport = 22'
    )
    assert inventory.hosts["local"] == Host(name="local", transport="local", slots=3)


# Where the file is found


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, and that of the user's configuration: both are empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SKYFAB_INVENTORY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def test_find_takes_the_variable_then_the_folder_then_the_users_configuration(
    cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = cwd / "config" / "skyfab" / "inventory.toml"
    mine.parent.mkdir(parents=True)
    files = {"named": Path("named.toml"), "here": Path("inventory.toml"), "mine": mine}
    for name, path in files.items():
        path.write_text(f"[hosts.{name}]")
    monkeypatch.setenv("SKYFAB_INVENTORY", "named.toml")
    for name, path in files.items():
        found = Inventory.find()
        assert (list(found.hosts), found.source) == ([name], path)
        monkeypatch.setenv("SKYFAB_INVENTORY", "")
        path.unlink()
    assert Inventory.find() == Inventory(hosts={"local": LOCAL}, source=None)


def test_a_variable_that_names_no_file_is_an_error_and_not_another_inventory(
    cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cwd / "inventory.toml").write_text("[hosts.a]")
    monkeypatch.setenv("SKYFAB_INVENTORY", "gone.toml")
    with pytest.raises(InventoryError, match=r"gone\.toml: No such file") as caught:
        Inventory.find()
    assert "unset SKYFAB_INVENTORY" in str(caught.value.hint) and "lab.up" in str(caught.value.hint)


# Selection


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, ["node1", "node2", "node3", "node4", "web1", "web2"]),
        ("all", ["node1", "node2", "node3", "node4", "web1", "web2"]),
        ("gpu", ["node1", "node2", "node3"]),
        ("node1", ["node1"]),  # the host, not web1 that has the tag
        ("front", ["web2"]),  # the group, not web1 that has the tag
        ("node[3,1-2]", ["node3", "node1", "node2"]),
        ("web*", ["web1", "web2"]),
        ("*[!34]", ["node1", "node2", "web1", "web2"]),
        (" web1 , node1 ,", ["web1", "node1"]),
        (["web1", "node1,node2"], ["web1", "node1", "node2"]),
        ("node1,gpu,node1", ["node1", "node2", "node3"]),
        ("!node3", ["node1", "node2", "node4", "web1", "web2"]),
        ("!node[1-3],!front", ["node4", "web1"]),
        ("gpu,!node2", ["node1", "node3"]),
        ("local,node1", ["local", "node1"]),
        ("all,local,!local", ["node1", "node2", "node3", "node4", "web1", "web2"]),
        ("nobody,node1", ["node1"]),
        ("10.0.0.11", ["node1"]),
        ("fe80::2", ["fe80::2"]),  # port 22, while web2's is 2222
        ("[fe80::2]:2222", ["web2"]),
        ("all,!10.0.1.1", ["node1", "node2", "node3", "node4", "web2"]),
        ("root@node1,node1,node2,!node1", ["node2"]),  # one machine, by whatever name
    ],
)
def test_a_selection_means_these_hosts_in_this_order(
    cluster: Inventory, selection: str | list[str] | None, expected: list[str]
) -> None:
    assert names(cluster.select(selection)) == expected


def test_hosts_themselves_can_be_selected_and_mixed_with_words(cluster: Inventory) -> None:
    mine = Host(name="mine", address="10.9.9.9")
    assert cluster.select(mine) == (mine,)
    assert names(cluster.select([mine, "gpu", cluster.hosts["node1"], "!node2"])) == ["mine", "node1", "node3"]
    assert names(cluster.select(host for host in (mine,))) == ["mine"]


def test_two_different_hosts_of_one_name_are_refused(cluster: Inventory) -> None:
    with pytest.raises(UsageError, match="two different hosts are called node1"):
        cluster.select(["node1", Host(name="node1")])


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("host.example.com", Host(name="host.example.com")),
        ("host:2222", Host(name="host:2222", address="host", port=2222)),
        ("ada@10.0.0.5:2222", Host(name="ada@10.0.0.5:2222", address="10.0.0.5", user="ada", port=2222)),
        ("ssh://ada@host:22", Host(name="ada@host:22", address="host", user="ada", port=22)),
        ("[::1]:22", Host(name="[::1]:22", address="::1", port=22)),
        ("ada@[fe80::1%eth0]:22", Host(name="ada@[fe80::1%eth0]:22", address="fe80::1%eth0", user="ada", port=22)),
        ("ada@corp.example@host", Host(name="ada@corp.example@host", address="host", user="ada@corp.example")),
        ("CORP\\ada@host", Host(name="CORP\\ada@host", address="host", user="CORP\\ada")),
    ],
)
def test_an_address_needs_no_inventory_and_is_not_stopped_by_one(cluster: Inventory, word: str, host: Host) -> None:
    assert Inventory(hosts={}).select(word) == (host,)
    assert cluster.select(word) == (host,)


def test_an_address_with_a_hosts_name_is_that_host_as_another_user(cluster: Inventory) -> None:
    (host,) = cluster.select("root@node1:2222")
    assert host == dataclasses.replace(cluster.hosts["node1"], name="root@node1:2222", user="root", port=2222)
    assert host.address == "10.0.0.11"


@pytest.mark.usefixtures("cwd")
def test_without_a_file_any_word_is_an_alias_of_ssh_config() -> None:
    inventory = Inventory.find()
    assert inventory.select() == inventory.select("all") == (LOCAL,)
    assert inventory.select("work,node[1-2],!node1") == (Host(name="work"), Host(name="node2"))


@pytest.mark.parametrize(
    ("selection", "message", "hint"),
    [
        ("nod1", 'cluster.toml: no host, group or tag matches "nod1"', "did you mean node1?"),
        ("wob1,nod2", 'cluster.toml: no host, group or tag matches "wob1", "nod2"', "did you mean web1, node2?"),
        ("n[2-1]", "[2-1] counts down", "write [1-2]"),
        ("node1 node2", 'cluster.toml: no host, group or tag matches "node1 node2"', "separate names with commas"),
        ("-oProxyCommand=x", 'cluster.toml: no host, group or tag matches "-oProxyCommand=x"', "known names"),
        (
            "node[1-5000]",
            'cluster.toml: no host, group or tag matches "node5", "node6", "node7", "node8", "node9" and 4991 more',
            "",
        ),
        ("node[1, 3]", "invalid range in 'node[1, 3]'", "node[01-10,12]"),
        ("node[1-99999999]", "'node[1-99999999]' expands to more than 10000 hosts", "check the numbers"),
        ("n[1-999]m[1-999]", "'n[1-999]m[1-999]' expands to more than 10000 hosts", "check the numbers"),
        ("", "no hosts are selected", "name some"),
        ("!all", "no hosts are selected", "exclude fewer"),
        (7, "not a host selection: 7", 'as in "node1,node2"'),
    ],
)
def test_an_invalid_selection_says_why_and_what_to_type(
    cluster: Inventory, selection: str | list[str], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        cluster.select(selection)
    assert caught.value.message == message
    assert hint in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_nodes_limits_the_selection(cluster: Inventory) -> None:
    assert names(cluster.select("web*,gpu", nodes=3)) == ["web1", "web2", "node1"]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (4, "nodes=4, but only 3 hosts selected"),
        (0, "1 or more, not 0"),
        (True, "not True"),
    ],
)
def test_invalid_nodes_are_refused(cluster: Inventory, nodes: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cluster.select("gpu", nodes=nodes)


# Ranges and addresses


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[1,3-4,2]", ["node1", "node3", "node4", "node2"]),
        ("r[1-2]n[1-2]x", ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
        ("node[ab]", ["node[ab]"]),
    ],
)
def test_ranges_count_and_keep_their_zeros(word: str, expected: list[str]) -> None:
    assert expand(word) == expected


def test_commas_inside_brackets_do_not_part_words() -> None:
    assert split("a, b[1,2],!c[3,4]d,,e") == ["a", "b[1,2]", "!c[3,4]d", "e"]


HOSTILE = """
    @h a@ h: h:0 h:65536 h:x h:22:23x :22 [h] [::1 [::1]x a/b a,b a* !a -h -u@h ada@-h a;b a`b`
    $(a) u$(a)@h a'b a"b a|b a&b
    ada:password@h u\\@h fe80::1%$(a) [fe80::1%-o]:22 ::1%
"""


@pytest.mark.parametrize("text", [*HOSTILE.split(), "", "a b", "a\n", "a\0", "[fe80::1%a b]", "a\u202eb", "a\u00a0b"])
def test_what_ssh_or_a_shell_could_take_for_something_else_is_not_an_address(text: str) -> None:
    assert Address.parse(text) is None
    assert Host.ad_hoc(text) is None
    with pytest.raises(UsageError):
        Host(name=text)
    with pytest.raises(UsageError):
        Host(name="a", address=text)


# Mistakes


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "has no hosts", "[hosts.node1]"),
        ("[host.a]", "unknown table [host]", "did you mean hosts?"),
        ('user = "ada"', 'unknown key "user"', "move it below [defaults]"),
        ('[hosts]\na = "10.0.0.1"', "[hosts.a]: must be a table, not a string", "[hosts.a] on its own"),
        ("[defaults]\nprot = 1\n[hosts.a]", '[defaults]: unknown key "prot"', "did you mean port?"),
        ("[hosts.a.b]", '[hosts.a]: unknown key "b"', 'put it in quotes: [hosts."name.b"]'),
        ("[hosts.all]", '[hosts.all]: "all" is reserved in selections', "rename the"),
        (
            '[hosts.local]\naddress = "10.0.0.1"',
            "[hosts.local] address: local is this machine, without SSH",
            "rename the host",
        ),
        ("[hosts.a2]\n[hosts.'a[1-2]']", '[hosts."a[1-2]"]: defines a2 again', "already in [hosts.a2]"),
        (
            "[hosts.'a[1-3]']\naddress = 'b[1-2]'",
            '[hosts."a[1-3]"] address: the name expands to 3 hosts, the address to 2',
            "same length",
        ),
        ("[hosts.a]\n[groups]\na = []", "[groups] a: a host has that name: [hosts.a]", "rename the group"),
        ("[hosts.a]\n[groups]\nall = []", '[groups] all: "all" is reserved in selections', "rename the"),
        ("[hosts.a]\n[groups]\ng = 'a'", "[groups] g: expected an array, not a string", 'g = ["node1", "node[2-4]"]'),
        (
            "[hosts.node1]\n[groups]\ng = ['nod1']",
            '[groups] g: no host, group or tag matches "nod1"',
            "did you mean node1?",
        ),
        (
            "[hosts.a]\n[groups]\ng = ['h']\nh = ['a', 'i']\ni = ['g']",
            "[groups] g: contains itself: g → h → i → g",
            "remove one of them",
        ),
    ],
)
def test_a_mistake_is_one_error_with_file_table_key_and_hint(text: str, message: str, hint: str) -> None:
    error = mistake(text)
    assert without_line(error) == f"inv.toml: {message}"
    assert hint in str(error.hint)


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        ("address", '""', "must not be empty", "remove the key"),
        ("address", '"-oProxyCommand=x"', "must not start with '-': '-oProxyCommand=x'", "option"),
        ("address", '"a b"', "not a host name or IP address: 'a b'", "10.0.0.11"),
        ("address", '"a:22"', "contains a port: 'a:22'", "instead"),
        ("address", '"ada@a"', "contains a user name: 'ada@a'", "instead"),
        ("port", "true", "must be an integer, not a boolean", ""),
        ("port", "0", "must be from 1 to 65535, not 0", "22"),
        ("user", '"-ada"', "must not start with '-': '-ada'", "option"),
        ("user", '"a;b"', "not a valid user name: 'a;b'", "letters"),
        ("identity", '"a\\u0000b"', "contains control characters", "newline"),
        ("jump", '"a,,b"', "not a valid jump host: ''", "user@address:port"),
        ("jump", '"-oX=y"', "must not start with '-': '-oX=y'", "option"),
        ("jump", '"a,-oX"', "not a valid jump host: '-oX'", "user@address:port"),
        ("host_key", '"AAAA"', "not a public host key", "ssh-ed25519 AAAA…"),
        ("host_key", f'"{KEY.replace("ed25519", "rsa")}"', "not a public host key", "ssh-ed25519 AAAA…"),
        ("python", '"python3"', "not a Python version or path: 'python3'", "absolute path"),
        ("gpus", "0", "must be an array, not an integer", "[0, 1]"),
        ("gpus", "[0, 0]", "must be distinct numbers, 0 or more", "nvidia-smi"),
        ("slots", "0", "must be between 1 and 4,096, not 0", "!name"),
        ("cache", '"scratch"', "must be an absolute path on the host: 'scratch'", "~/"),
        ("workdir", '"~ada"', "must be an absolute path on the host: '~ada'", "~/"),
        ("transport", '"tcp"', "unknown transport: 'tcp'", "one of auto, openssh, fabric, local"),
        ("interface", '"eth 0"', "not a network interface: 'eth 0'", "ip link"),
        ("tags", '["a,b"]', "invalid tag: 'a,b'", "letters"),
        ("env", "{ A = 8 }", "A must be a string, not an integer", "quotes"),
        ("env", '{ "A=B" = "x" }', "invalid variable name: 'A=B'", "letters"),
        ("env", '{ A = "\\u0000" }', "A contains a NUL character", "do not accept"),
    ],
)
def test_an_invalid_value_names_its_key(key: str, value: str, message: str, hint: str) -> None:
    for table in ("hosts.a", "defaults"):
        error = mistake(f"[{table}]\n{key} = {value}\n[hosts.b]")
        assert without_line(error) == f"inv.toml: [{table}] {key}: {message}"
        assert hint in str(error.hint)


@pytest.mark.parametrize(
    "name", ["-a", "a,b", "!a", "a[", "a]", "a b", "a@b", "a/b", "a:b", "a*", "a?", "", ".a", "a\t"]
)
def test_a_hosts_name_is_never_taken_for_an_option_a_selector_or_an_address(name: str) -> None:
    error = mistake(f"[hosts.{json.dumps(name)}]")
    assert without_line(error).startswith(f"inv.toml: [hosts.{json.dumps(name)}]: ") or name == "-a"
    assert error.hint


@pytest.mark.parametrize(
    "text", ["[hosts.a]\nport = =", "[hosts.a]\nport = 1 1", "[hosts.a]\n\0", "[hosts.'a.b']\n[hosts.'a.b']"]
)
def test_what_is_not_toml_is_reported_with_its_line(text: str) -> None:
    error = mistake(text)
    assert error.message.startswith("inv.toml: not valid TOML: ")
    assert "line 2" in error.message
    assert error.hint


def test_a_host_with_a_mistake_is_not_also_missing_from_its_group() -> None:
    assert "mistakes" not in mistake('[hosts.a]\nport = 0\n[groups]\ng = ["a"]').message


# Host


def test_a_host_made_in_python_is_checked_like_one_in_a_file() -> None:
    with pytest.raises(UsageError, match="Host 'a': address: must not start with '-'"):
        Host(name="a", address="-oProxyCommand=x")
    with pytest.raises(UsageError, match="Host 'a': python: must be a string"):
        Host(name="a", python=None)  # type: ignore[arg-type]
    assert Host(name="a", gpus=[0], tags=["x"]) == Host(name="a", gpus=(0,), tags=("x",))  # type: ignore[arg-type]


def test_a_host_shows_the_names_of_its_variables_and_never_their_values() -> None:
    host = Host(name="a", env={"TOKEN": "hunter2", "PIN": "1234"})
    for text in (repr(host), str(host), f"{host.env}", repr([host.env]), repr(dataclasses.replace(host, port=1))):
        assert "TOKEN" in text
        assert "[secret]" in text
        assert "hunter2" not in text
        assert "1234" not in text


def test_a_mistake_in_variables_does_not_show_their_values() -> None:
    for text in ("[hosts.a]\nenv = { TOKEN = 1234567 }", '[hosts.a]\nenv = ["hunter2"]', '[hosts.a]\nenv = "hunter2"'):
        error = str(mistake(text))
        assert "1234567" not in error
        assert "hunter2" not in error


def test_a_host_is_a_value() -> None:
    host = Host(name="a", env={"A": "1"}, tags=("x",))
    assert {host: 1}[dataclasses.replace(host)] == 1
    assert pickle.loads(pickle.dumps(host)) == copy.deepcopy(host) == host
    assert json.loads(json.dumps(dataclasses.asdict(host)))["env"] == {"A": "1"}
    assert host != dataclasses.replace(host, env={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        host.name = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("host", "login"),
    [
        (Host(name="a"), "a"),
        (Host(name="a", address="b", user="ada"), "ada@b"),
        (Host(name="a", address="fe80::1", port=22), "[fe80::1]:22"),
        (Host(name="a", address="[::1]"), "[::1]"),
    ],
)
def test_login_is_what_ssh_takes_for_a_jump(host: Host, login: str) -> None:
    assert host.login == login


# Jumps


@pytest.mark.parametrize(
    ("jump", "chain"),
    [
        (None, []),
        ("none", []),
        ("inner", ["outer.example.com:2222", "ada@10.0.0.1"]),
        ("outer,inner", ["outer.example.com:2222", "ada@10.0.0.1"]),
        ("bob@elsewhere:23", ["bob@elsewhere:23"]),
        ("alias", ["alias"]),
        ("root@inner", ["outer.example.com:2222", "root@10.0.0.1"]),
        ("x,outer", ["x", "outer.example.com:2222"]),
    ],
)
def test_a_jump_is_resolved_to_hosts_the_nearest_first(jump: str | None, chain: list[str]) -> None:
    inventory = Inventory.parse("""
        [hosts.outer]
        address = "outer.example.com"
        port = 2222
        [hosts.inner]
        address = "10.0.0.1"
        user = "ada"
        jump = "outer"
        """)
    assert [hop.login for hop in inventory.jump_chain(Host(name="a", jump=jump))] == chain


def test_a_hop_of_the_inventory_keeps_its_key_and_identity() -> None:
    inventory = Inventory.parse(f'[hosts.gw]\nhost_key = "{KEY}"\nidentity = "/k"\n[hosts.a]\njump = "gw"')
    assert inventory.jump_chain(inventory.hosts["a"]) == (inventory.hosts["gw"],)


def test_a_circle_of_jumps_made_in_python_ends_in_an_error() -> None:
    a, b = Host(name="a", jump="b"), Host(name="b", jump="a")
    with pytest.raises(InventoryError, match="loop: a → b → a\n"):
        Inventory(hosts={"a": a, "b": b}).jump_chain(a)


# Whatever people type (tests/fuzz has more)


@settings(database=None, deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=30), st.text("node1234[]-,!*?@:.%ab \\", max_size=20)))
def test_an_address_read_and_written_is_the_same(word: str) -> None:
    host = Host.ad_hoc(word)
    if host is not None:
        again = Host.ad_hoc(host.login)
        assert again is not None
        assert (again.destination, again.user, again.port) == (host.destination.strip("[]"), host.user, host.port)
