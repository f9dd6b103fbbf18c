"""`skyfab hosts --from`, and hosts of other places in every command: ssh_config, Slurm, hostfiles, Ansible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stage.program import Skyfab

from skyfab.inventory.inventory import Inventory

ANSIBLE = "[gpu]\nnode[1:2] ansible_user=ada\n[all:children]\ngpu\n[here]\nme ansible_connection=local\n"


@pytest.fixture(autouse=True)
def ssh_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file `config` in the test's own folder."""
    (tmp_path / "config").write_text(
        "Host box\n  Port 1\nHost web\n  Port 2\nHost box web\n  HostName 127.0.0.1\n"
        "Host github.com\n  User git\nHost *\n  ConnectTimeout 5\n"
    )
    monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(tmp_path / "config"))


# ---- hosts --from


def test_aliases_are_shown_and_what_is_left_out_is_said(skyfab: Skyfab) -> None:
    code, out, err = skyfab("hosts", "--from=ssh_config")
    assert (code, out) == (0, "host  address  groups\nbox   box\nweb   web\n")
    assert err == 'skipped github.com: "User git" is a Git server\n'
    assert skyfab("hosts", "--from=ssh_config:b*").out == "host  address  groups\nbox   box\n"


def test_a_source_is_shown_with_logins_and_groups(skyfab: Skyfab) -> None:
    Path("cluster").write_text(ANSIBLE)
    code, out, _ = skyfab("hosts", "--from=cluster")
    assert code == 0
    assert out == (
        "host   address       groups\nnode1  ada@node1     gpu\nnode2  ada@node2     gpu\nme     this machine  here\n"
    )
    listed = json.loads(skyfab("hosts", "--from=cluster", "--json", "gpu,!node1").out)
    assert listed == [{"name": "node2", "address": "ada@node2", "groups": ["gpu"]}]


@pytest.mark.parametrize("text", ["node1 slots=4\nada@node2 slots=2\n", '[hosts."n[1-3]"]\n[groups]\ng = ["n1"]\n'])
def test_toml_that_is_printed_is_an_inventory_that_is_equal(skyfab: Skyfab, text: str) -> None:
    Path("cluster").write_text(text)
    code, out, err = skyfab("hosts", "--from=cluster", "--toml")
    assert (code, err) == (0, "")
    assert Inventory.parse(out) == Inventory.of("cluster")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from=missing"], "error: missing: No such file"),
        (["--from=odd"], "write hostfile:odd or ansible:odd"),
        (["--from=wrong"], "error: wrong:2: slots must be a whole number"),
        (["--from=ssh_config:zzz"], "has no hosts\nhint: its aliases are box, web, github.com"),
        (["--from=ssh_config", "bx"], "hint: did you mean box?"),
        (["--from=ssh_config", "--inventory=x"], "--from and --inventory cannot be combined"),
        (["--toml"], "hint: skyfab hosts --from=ssh_config --toml"),
        (["--from=ssh_config", "--toml", "box"], "--toml cannot be combined with hosts or --json"),
    ],
)
def test_what_cannot_be_shown_is_one_message_and_2(skyfab: Skyfab, words: list[str], says: str) -> None:
    Path("odd").write_text("node1:4\n")
    Path("wrong").write_text("a\nb slots=x\n")
    code, out, err = skyfab("hosts", *words)
    assert (code, out) == (2, "")
    assert says in err


# ---- in every command

COMMANDS = {
    "exec": ["--", "true"],
    "get": ["x"],
    "run": ["x.py"],
}


@pytest.mark.parametrize("task", COMMANDS)
def test_an_alias_of_ssh_config_is_a_host_beside_an_inventory_file(skyfab: Skyfab, task: str) -> None:
    """Nothing listens there: the command gets as far as to connect, and says so."""
    Path("inventory.toml").write_text("[hosts.node1]\n")
    Path("x.py").write_text("")
    ran = skyfab(task, "--hosts=box", *COMMANDS[task])
    assert "box" in ran.out + ran.err and ran.code in (1, 3), ran
    ran = skyfab(task, "--hosts=bxo", *COMMANDS[task])
    assert ran.code == 2 and 'no host, group or tag matches "bxo"\nhint: did you mean box?' in ran.err


@pytest.mark.parametrize("source", ["ssh_config:b*", "hostfile:list", "list"])
def test_every_command_takes_a_source_in_place_of_a_file(skyfab: Skyfab, source: str) -> None:
    Path("list").write_text("box\n")
    code, out, err = skyfab("hosts", f"--inventory={source}", "box", "--json")
    assert code == 3 and json.loads(out)[0]["name"] == "box" and not json.loads(out)[0]["reachable"], err
    ran = skyfab("exec", f"--inventory={source}", "--hosts=box", "--", "true")
    assert ran.code in (1, 3) and "box" in ran.err
