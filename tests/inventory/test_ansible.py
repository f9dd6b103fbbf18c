"""Inventories of Ansible: INI and YAML mean the same hosts, by Ansible's precedence, and mistakes have their lines."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from skyfab.errors import InventoryError, UsageError
from skyfab.inventory.ansible import expand
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory

pytest.importorskip("yaml")


def read(text: str, folder: Path, name: str = "hosts.ini") -> Inventory:
    path = folder / name
    path.write_text(text)
    return Inventory.from_ansible(path)


def mistake(text: str, folder: Path, name: str = "hosts.ini") -> str:
    """The message of an inventory that must have a mistake, without its folder."""
    with pytest.raises(InventoryError) as caught:
        read(text, folder, name)
    assert caught.value.hint or "mistakes" in caught.value.message
    return caught.value.message.replace(f"{folder}/", "")


INI = """
# the first has no group
mail.example.com ansible_user=root

[web]
web[01:03].example.com:2222   ; no comment of Ansible's
www ansible_host=10.0.0.9 ansible_port=23 # but this is one

[db]
db-[a:c] ansible_ssh_private_key_file="~/.ssh/db key"

[prod:children]
web
db

[all:vars]
ansible_user = ada
ntp_server = {{ not_looked_at }}

[prod:vars]
ansible_ssh_common_args='-o StrictHostKeyChecking=no -o ProxyJump=bob@gate:22'
"""

YAML = """
all:
  vars:
    ansible_user: ada
    ntp_server: "{{ not_looked_at }}"
  hosts:
    mail.example.com: {ansible_user: root}
  children:
    prod:
      vars:
        ansible_ssh_common_args: -o StrictHostKeyChecking=no -o ProxyJump=bob@gate:22
      children:
        web:
          hosts:
            web[01:03].example.com:
              ansible_port: 2222
            www:
              ansible_host: 10.0.0.9
              ansible_port: 23
        db:
          hosts:
            db-[a:c]:
              ansible_ssh_private_key_file: ~/.ssh/db key
"""


def test_ini_and_yaml_mean_the_same(tmp_path: Path) -> None:
    ini = read(INI.replace("   ; no comment of Ansible's", ""), tmp_path)
    yaml = read(YAML, tmp_path, "hosts.yml")
    assert dict(ini.hosts) == dict(yaml.hosts)
    assert {name: set(of) for name, of in ini.groups.items()} == {name: set(of) for name, of in yaml.groups.items()}
    assert ini.hosts["mail.example.com"] == Host(name="mail.example.com", user="root")
    assert ini.hosts["web02.example.com"] == Host(name="web02.example.com", port=2222, user="ada", jump="bob@gate:22")
    assert ini.hosts["www"].login == "ada@10.0.0.9:23"
    assert ini.hosts["db-b"].identity == str(Path("~/.ssh/db key").expanduser())
    assert set(ini.groups) == {"web", "db", "prod"}
    assert ini.groups["prod"][:4] == ("web01.example.com", "web02.example.com", "web03.example.com", "www")


# Variables


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("[g]\na\n[all:vars]\nansible_user=x", "x"),
        ("[g]\na\n[all:vars]\nansible_user=x\n[g:vars]\nansible_user=y", "y"),
        ("[g:vars]\nansible_user=y\n[all:vars]\nansible_user=x\n[g]\na", "y"),
        ("[g]\na ansible_user=z\n[g:vars]\nansible_user=y", "z"),
        ("[p:children]\ng\n[g]\na\n[p:vars]\nansible_user=x\n[g:vars]\nansible_user=y", "y"),
        ("[z:children]\ng\n[g]\na\n[z:vars]\nansible_user=x\n[g:vars]\nansible_user=y", "y"),
        ("[b]\na\n[c]\na\n[b:vars]\nansible_user=x\n[c:vars]\nansible_user=y", "y"),
        ("[b]\na\n[c]\na\n[b:vars]\nansible_user=x\nansible_group_priority=10\n[c:vars]\nansible_user=y", "x"),
        ("a\n[ungrouped:vars]\nansible_user=x", "x"),
        ("a ansible_user=x\n[g]\na ansible_user=y", "y"),
        ("a ansible_user=x ansible_ssh_user=y", "y"),
        ('a\n[all:vars]\nansible_user = "x"  # said', "x"),
        ("a\n[all:vars]\nansible_user='x'", "x"),
        ("a\n[all:vars]\nansible_user=", None),
    ],
)
def test_variables_have_the_precedence_that_ansible_gives_them(text: str, user: str | None, tmp_path: Path) -> None:
    assert read(text, tmp_path).hosts["a"].user == user


def test_variables_of_files_beside_the_inventory_are_taken(tmp_path: Path) -> None:
    """Those of groups come after all that the inventory says of groups, those of a host last."""
    for path, user in {
        "group_vars/all.yml": "of_all",
        "group_vars/g/main.yaml": "of_g",
        "host_vars/b.yml": "of_b",
        "host_vars/c": "of_c",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"---\nansible_user: {user}\nsecret: [1, 2]\n")
    (tmp_path / "host_vars" / "d.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n6162\n")
    inventory = read("d\n[g]\na\nb ansible_user=x\n[h]\nc ansible_user=y\n[g:vars]\nansible_user=z", tmp_path)
    assert {name: host.user for name, host in inventory.hosts.items()} == {
        "a": "of_g",
        "b": "of_b",
        "c": "of_c",
        "d": "of_all",
    }
    assert inventory.left_out == {str(tmp_path / "host_vars" / "d.yml"): "is encrypted"}


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("a:23", 23),
        ("a:23\n[g]\na:24", 23),
        ("a\n[g]\na:24", None),
        ("a:23 ansible_port=25", 25),
        ("a:23\n[g]\na ansible_port=25", 25),
        ("a:23\n[all:vars]\nansible_port=25 # said", 23),
        ("a\n[all:vars]\nansible_port=25 # said", 25),
    ],
)
def test_a_port_in_a_name_counts_where_the_host_is_first(text: str, port: int | None, tmp_path: Path) -> None:
    assert read(text, tmp_path).hosts["a"].port == port


@pytest.mark.parametrize(
    ("args", "jump"),
    [
        ("-J gate", "gate"),
        ("-Jgate", "gate"),
        ("-o ProxyJump=ada@gate:22,b", "ada@gate:22,b"),
        ("-oProxyJump=gate", "gate"),
        ("-o 'ProxyJump gate'", "gate"),
        ("-o proxyjump=gate -o ControlMaster=auto", "gate"),
        ("-C -o StrictHostKeyChecking=no", None),
        ("-o ProxyJump=none", "none"),
        ('-o ProxyCommand="ssh -W %h:%p -q ada@gate"', "ada@gate"),
        ("-o ProxyCommand='ssh -q -p 23 -l ada gate -W %h:%p'", "ada@gate:23"),
        ("-o ProxyJump=a", None),
        ("-o ProxyJump=root@10.0.0.1:22", None),
    ],
)
def test_a_plain_jump_is_taken_from_the_options_of_ssh(args: str, jump: str | None, tmp_path: Path) -> None:
    """Not to the host itself, which variables of all hosts may name."""
    text = f"a ansible_host=10.0.0.1\n[all:vars]\nansible_ssh_common_args={args}\n"
    assert read(text, tmp_path).hosts["a"].jump == jump


def test_what_is_not_reached_by_ssh_is_this_machine_or_left_out(tmp_path: Path) -> None:
    text = "[local]\nlocalhost ansible_connection=local\n[w]\nwin ansible_connection=winrm\nlin\n[x:children]\nlocal\nw"
    inventory = read(text, tmp_path)
    assert inventory.hosts == {"localhost": Host(name="localhost", transport="local"), "lin": Host(name="lin")}
    assert inventory.groups == {"w": ("lin",), "x": ("lin", "localhost")} or inventory.groups["x"] == (
        "localhost",
        "lin",
    )
    assert inventory.left_out == {
        "win": "is reached by winrm, not by SSH",
        "local": "is a group, and a word of its own in selections",
    }


# Ranges


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a", ["a"]),
        ("n[1:3]", ["n1", "n2", "n3"]),
        ("n[08:10]x", ["n08x", "n09x", "n10x"]),
        ("n[1:9:4]", ["n1", "n5", "n9"]),
        ("[a:c]", ["a", "b", "c"]),
        ("[A:B]-[1:2]", ["A-1", "A-2", "B-1", "B-2"]),
    ],
)
def test_ranges_count_as_ansibles_do(word: str, expected: list[str]) -> None:
    assert expand(word) == expected


@pytest.mark.parametrize(
    "word",
    ["n[1-3]", "n[1:", "n1:3]", "n[3:1]", "n[1:c]", "n[a:Z]", "n[:3]", "n[1:3:0]", "n[0:99999999]", "[1:999][1:999]"],
)
def test_a_range_that_cannot_be_is_a_usage_error(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand(word)
    assert caught.value.hint


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts.ini: has no hosts"),
        ("[g]", "hosts.ini: has no hosts"),
        ("a\nb ansible_host='{{ x }}'", "hosts.ini:2: 'b' ansible_host: is a template, and nothing is evaluated here"),
        ("a\n[all:vars]\nansible_user={% x %}", "hosts.ini:3: 'a' ansible_user: is a template"),
        ("a ansible_port=ssh", "hosts.ini:1: 'a' ansible_port: must be an integer, not a string"),
        ("a ansible_port=70000", "hosts.ini:1: 'a' ansible_port: must be from 1 to 65535"),
        ("a:0", "hosts.ini:1: 'a' ansible_port: must be from 1 to 65535"),
        ("a ansible_host=-oX", "hosts.ini:1: 'a' ansible_host: starts with '-'"),
        ("a ansible_user='x y'", "hosts.ini:1: 'a' ansible_user: cannot be a user's name"),
        ("a\nb b c=d", "hosts.ini:2: 'b' is no variable"),
        ("a x='", "hosts.ini:1: has a quote that does not end"),
        ("a\n[g", "hosts.ini:2: has a bracket that does not end"),
        ("a\n[g:kids]\nb", "hosts.ini:2: [g:kids]: is no section"),
        ("a\n[g:vars]\nx=y", "hosts.ini:2: [g:vars]: there is no group g"),
        ("a\n[all:vars]\nnothing", "hosts.ini:3: is no variable of [all:vars]"),
        ("a\n[g:children]\nh", "hosts.ini:2: group 'g': no host, group or tag fits h"),
        ("a\n[g:children]\nh\n[h:children]\ng", "hosts.ini:2: group 'g': contains itself: g → h → g"),
        ("[a]\na", "hosts.ini:1: group 'a': a host has that name"),
        ("n[3:1]", "hosts.ini:1: 'n[3:1]' has a range that counts down"),
        ("ada@a", "hosts.ini:1: 'ada@a': cannot be a host's name"),
        ("a ansible_host=1.1.1.1\nb ansible_host=1.1.1.1", "hosts.ini:2: 'b' ansible_host: b has 1.1.1.1, as a has"),
        (
            "a ansible_ssh_common_args='-o ProxyCommand=\"nc %h %p\"'",
            "hosts.ini:1: 'a' ansible_ssh_common_args: has a ProxyCommand that is no plain jump",
        ),
        ("a ansible_ssh_common_args='-J \"x'", "hosts.ini:1: 'a' ansible_ssh_common_args: No closing quotation"),
        ("a ansible_ssh_common_args='-J a;b'", "hosts.ini:1: 'a' ansible_ssh_common_args: cannot be reached: 'a;b'"),
    ],
)
def test_a_mistake_of_an_ini_file_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    assert mistake(text, tmp_path).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "h.yml: has no hosts"),
        ("all:", "h.yml: has no hosts"),
        ("all:\n  hosts:\n   a: }", "h.yml:3: is not YAML: "),
        ("all:\n\thosts:", "h.yml:2: is not YAML: "),
        ("- hosts: all", "h.yml:1: an inventory must be a mapping"),
        ("all:\n  hosts: [a, b]", "h.yml:2: hosts of 'all' must be a mapping"),
        ("all:\n  host:\n    a:", "h.yml:2: group 'all': host is no key of a group"),
        ("all:\n  hosts:\n    a: 1", "h.yml:3: 'a' must be a mapping"),
        ("all:\n  hosts:\n    a:\n      ansible_host: '{{ x }}'", "h.yml:4: 'a' ansible_host: is a template"),
        ("all:\n  hosts:\n    a: {ansible_host: [1]}", "h.yml:3: ansible_host: must be a text"),
        ("all:\n  hosts:\n    a: {ansible_user: !vault x}", "h.yml:3: ansible_user: is !vault, which cannot be read"),
        ("all:\n  hosts:\n    ? [a]\n    : {}", "h.yml:3: hosts of 'all' has a key that is no name"),
        ("plugin: aws_ec2\nregions: [x]", "h.yml: is the configuration of a plugin"),
        ("a: &a\n  hosts: {h: }\n  children: {a: *a, b: {children: {a: }}}", "h.yml:1: group 'a': contains itself"),
        ("--- a\n--- b", "h.yml:2: is not YAML"),
        ("all: {hosts: {a: {}}}\n\x01", "h.yml: is not YAML"),
        ("[" * 500_000, "h.yml:1: is nested too deeply"),
        ("- " * 500_000, "h.yml:1: is nested too deeply"),
        ("all: *a", "h.yml:1: is not YAML: there is no &a"),
    ],
)
def test_a_mistake_of_a_yaml_file_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    found = mistake(text, tmp_path, "h.yml")
    assert found.splitlines()[-1].strip().startswith(message) or message in found


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    found = mistake("a ansible_port=x\nb x\n[g:children]\nnobody\n", tmp_path)
    assert found.splitlines()[0] == "hosts.ini: 3 mistakes"
    assert sorted(line.split(":")[1] for line in found.splitlines()[1:]) == ["1", "2", "3"]


def test_aliases_and_merges_of_yaml_are_understood(tmp_path: Path) -> None:
    text = """
    .base: &base {ansible_user: ada, ansible_port: 22}
    all:
      hosts:
        a: {<<: *base, ansible_port: 23}
        b: *base
    """
    found = mistake(text, tmp_path, "h.yml")  # .base is a group for Ansible too
    assert "ansible_user is no key of a group" in found
    assert list(read("all:\n  hosts: a", tmp_path, "h.yml").hosts) == ["a"]
    text = "all:\n  hosts:\n    a: &base {ansible_user: ada, ansible_port: 22}\n    b: {<<: *base, ansible_port: 23}\n"
    assert [host.login for host in read(text, tmp_path, "h.yml").hosts.values()] == ["ada@a:22", "ada@b:23"]


HOSTILE = {
    "large": "all:\n  hosts:\n" + "".join(f"    n{n}: {{ansible_user: ada}}\n" for n in range(5_000)),
    "laughs": "a0: &a0 {hosts: {h: }}\n"
    + "".join(
        f"a{n}: &a{n} {{children: {{x{n}: *a{n - 1}, y{n}: *a{n - 1}, z{n}: *a{n - 1}}}}}\n" for n in range(1, 60)
    ),
    "merges": "all:\n  hosts:\n    h0: &h0 {ansible_user: a}\n"
    + "".join(f"    h{n}: &h{n} {{<<: [{', '.join([f'*h{n - 1}'] * 9)}]}}\n" for n in range(1, 60)),
    "itself": "all: &a {hosts: {h: }, children: {b: *a, c: &c {<<: *c, children: *c}}}",
    "wide": "all:\n  hosts: &h {'n[1:9999]': }\n  children:\n"
    + "".join(f"    g{n}: {{hosts: *h}}\n" for n in range(900)),
    "many": "all:\n  hosts:\n" + "".join(f"    x{n}n[1:9999]:\n" for n in range(50)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_multiplies_ends(text: str, tmp_path: Path) -> None:
    """In hosts or in an error, and within the test's time."""
    try:
        found = str(read(text, tmp_path, "h.yml"))
    except InventoryError as error:
        found = str(error)
    assert len(found) < 100_000


def test_a_chain_of_groups_of_any_length_is_read(tmp_path: Path) -> None:
    chain = "".join(f"[g{n}:children]\ng{n + 1}\n" for n in range(1200))
    variables = "[g1:vars]\nansible_port=1\n[g1199:vars]\nansible_port=2\n[g0:vars]\nansible_port=3\n"
    inventory = read(f"{chain}[g1200]\na\n{variables}", tmp_path)
    assert inventory.hosts["a"].port == 2
    assert inventory.groups["g0"] == ("a",)


def test_without_pyyaml_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **keywords: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InventoryError, match="is YAML, and PyYAML is not installed") as caught:
        read(YAML, tmp_path, "hosts.yml")
    assert caught.value.hint == "pip install 'skyfab[ansible]'"
    assert read("a", tmp_path).hosts
