"""Inventories of Ansible, read by the real ansible-inventory: hosts, groups, logins, and what is a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyfab.errors import InventoryError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory


def read(text: str, folder: Path, name: str = "hosts.ini") -> Inventory:
    path = folder / name
    path.write_text(text)
    return Inventory.of(f"ansible:{path}")


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


def test_variables_make_the_login(tmp_path: Path) -> None:
    text = """
a ansible_user=x ansible_ssh_user=y
b ansible_user=
c:23
d ansible_user=7
[g]
e
[g:vars]
ansible_port=25 # a comment
"""
    assert [host.login for host in read(text, tmp_path).hosts.values()] == ["y@a", "b", "c:23", "7@d", "e:25"]


def test_a_folder_is_an_inventory_with_group_vars_and_host_vars(tmp_path: Path) -> None:
    for name, text in {
        "1.ini": "[g]\na\nb\n",
        "2.yml": "all: {hosts: {c: }}",
        "group_vars/all.yml": "ansible_user: of_all",
        "group_vars/g.yml": "ansible_user: of_g",
        "host_vars/b.yml": "ansible_user: of_b",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    inventory = Inventory.of(tmp_path)
    assert {name: host.user for name, host in inventory.hosts.items()} == {"a": "of_g", "b": "of_b", "c": "of_all"}
    assert inventory.groups == {"g": ("a", "b")}


def test_a_program_can_be_an_inventory(tmp_path: Path) -> None:
    """Ansible runs it."""
    program = tmp_path / "list.json"
    program.write_text('#!/bin/sh\necho \'{"g": {"hosts": ["a"], "vars": {"ansible_port": 23}}}\'\n')
    program.chmod(0o755)
    assert Inventory.of(program).hosts == {"a": Host(name="a", port=23)}


JUMPS = {
    "-J gate": "gate",
    "-Jgate": "gate",
    "-o ProxyJump=ada@gate:22,b": "ada@gate:22,b",
    "-oProxyJump=gate": "gate",
    "-o 'ProxyJump gate'": "gate",
    "-o proxyjump=gate -o ControlMaster=auto": "gate",
    "-C -o StrictHostKeyChecking=no": None,
    "-o ProxyJump=none": "none",
    "-o ProxyJump=host8": None,
    "-o ProxyJump=root@10.0.0.1:22": None,
}


def test_a_plain_jump_is_taken_from_the_options_of_ssh(tmp_path: Path) -> None:
    """Not to the host itself, which variables of all hosts may name."""
    hosts = {f"host{n}": {"ansible_host": "10.0.0.1", "ansible_ssh_common_args": args} for n, args in enumerate(JUMPS)}
    found = read(json.dumps({"all": {"hosts": hosts}}), tmp_path, "hosts.yml").hosts
    assert dict(zip(JUMPS, (host.jump for host in found.values()), strict=True)) == JUMPS


def test_a_host_with_another_connection_is_this_machine_or_skipped(tmp_path: Path) -> None:
    text = "[local]\nlocalhost ansible_connection=local\n[w]\nwin ansible_connection=winrm\nlin\n[x:children]\nlocal\nw"
    inventory = read(text, tmp_path)
    assert inventory.hosts == {"localhost": Host(name="localhost", transport="local"), "lin": Host(name="lin")}
    assert {name: set(of) for name, of in inventory.groups.items()} == {"w": {"lin"}, "x": {"lin", "localhost"}}
    assert inventory.left_out == {
        "win": "ansible_connection is winrm, not SSH",
        "local": "the group's name is reserved in selections",
    }


# Mistakes


MISTAKES = """
all:
  hosts:
    a: {ansible_host: "{{ x }}"}
    b: {ansible_ssh_private_key_file: "{{ x }}/id"}
    c: {ansible_port: ssh}
    d: {ansible_host: -oX}
    e: {ansible_ssh_common_args: '-o ProxyCommand="nc %h %p"'}
    f: {ansible_ssh_common_args: '-J "x'}
    g:
      ansible_user: !vault |
        $ANSIBLE_VAULT;1.1;AES256
        6162
  children:
    h:
      hosts: {h: }
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[g]", "hosts.ini: has no hosts"),
        ("a\nb ansible_host='{{ x }}'", "hosts.ini: 'b' ansible_host: not a host name or IP address: '{{ x }}'"),
        (
            "a ansible_ssh_private_key_file='{{ x }}/id'",
            "hosts.ini: 'a' ansible_ssh_private_key_file: contains a template: '{{ x }}/id'",
        ),
        ("a ansible_port=ssh", "hosts.ini: 'a' ansible_port: must be an integer, not a string"),
        ("a ansible_port=70000", "hosts.ini: 'a' ansible_port: must be from 1 to 65535"),
        ("a ansible_host=-oX", "hosts.ini: 'a' ansible_host: must not start with '-'"),
        ("[a]\na", "hosts.ini: group 'a': a host has that name"),
        (
            "a ansible_ssh_common_args='-o ProxyCommand=\"nc %h %p\"'",
            "hosts.ini: 'a' ansible_ssh_common_args: a ProxyCommand is not supported",
        ),
        ("a ansible_ssh_common_args='-J \"x'", "hosts.ini: 'a' ansible_ssh_common_args: No closing quotation"),
        ("a\n[g", "hosts.ini: Ansible cannot read it: "),
        ("a\n[g:children]\nh\n[h:children]\ng", "hosts.ini: Ansible cannot read it: Adding group 'g' as child to 'h'"),
    ],
)
def test_a_mistake_names_the_file_the_host_and_the_variable(text: str, message: str, tmp_path: Path) -> None:
    assert mistake(text, tmp_path).startswith(message)


def test_what_ansible_cannot_read_has_the_command_that_shows_why(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match=r"h.yml: Ansible cannot read it: ") as caught:
        read("all:\n  hosts:\n   a: }", tmp_path, "h.yml")
    assert caught.value.hint == f"ansible-inventory -i {tmp_path}/h.yml --list"


def test_without_ansible_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(InventoryError, match="Ansible is not installed") as caught:
        read("a", tmp_path)
    assert caught.value.hint == "uv tool install ansible-core"


@pytest.mark.parametrize("printed", ["", "[]", "{", '{"_meta": 1}', '{"all": {"hosts": {"a": 1}}}'])
def test_what_is_not_an_inventory_is_an_error(printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ansible-inventory"
    program.write_text(f"#!/bin/sh\necho '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert "printed something else than an inventory" in mistake(INI, tmp_path)
