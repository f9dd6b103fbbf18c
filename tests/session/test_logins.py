"""Logins at a terminal and without one: passwords, one-time codes, passphrases; and refusals, each with what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stage.asking import ask_for_codes, code, take_passwords_only
from stage.labs import start_for_calls
from stage.typist import Typist

import skyfab as sky
from skyfab.lab import Lab

pytestmark = pytest.mark.lab
both = pytest.mark.parametrize("by", ["openssh", "fabric"])
"""The two that go over SSH."""
SKYFAB = [sys.executable, "-m", "skyfab"]
PASSWORD = r"Password: "
CODE = r"One-time password \(OATH\) for `pat': "


@pytest.fixture(scope="module")
def hosts() -> Iterator[Lab]:
    """node1 and node2 take passwords only, node3 a password and a code, node4 keys too, node5 keys only."""
    with start_for_calls(5) as lab:
        for name in ("node1", "node2"):
            take_passwords_only(lab[name])
        ask_for_codes(lab["node3"], lab.password)
        settings = lab["node5"].path("/etc/ssh/sshd_config")
        settings.write_text(settings.read_text().replace("PasswordAuthentication yes", "PasswordAuthentication no"))
        lab["node5"].reboot()
        yield lab


@pytest.fixture
def inventory(hosts: Lab, by: str, tmp_path: Path) -> Path:
    """The hosts as `pat` sees them, by one transport; `behind` is node4, through node1."""
    text = hosts.inventory.read_text().replace('user = "root"', f'user = "pat"\ntransport = "{by}"')
    node4 = re.search(r"\[hosts\.node4\]\n(.*?)\n\n", text, re.DOTALL)
    assert node4
    behind = f'[hosts.behind]\n{node4[1]}\njump = "node1"\n\n'
    path = tmp_path / "inventory.toml"
    path.write_text(text.replace("[groups]", f"{behind}[groups]"))
    return path


def at_terminal(inventory: Path, *words: str) -> Typist:
    return Typist([*SKYFAB, *words], inventory.parent)


def piped(inventory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SKYFAB, *words], cwd=inventory.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=170
    )


# ---- at a terminal


@both
def test_a_password_is_asked_for_at_a_terminal(hosts: Lab, inventory: Path) -> None:
    with at_terminal(inventory, "exec", "node1", "--", "id -un; hostname") as person:
        person.sees(rf"node1 \(pat@{hosts['node1'].address}:22\): {PASSWORD}")
        assert not person.echoes()
        assert person.is_quiet(0.5), "nothing is drawn over the question"
        person.types(hosts.password)
        assert person.ends() == 0, person.said
        assert "pat" in person.said and "node1" in person.said
        assert hosts.password not in person.said
        assert person.echoes()


@both
def test_several_hosts_ask_one_after_another_and_each_says_which_it_is(hosts: Lab, inventory: Path) -> None:
    with at_terminal(inventory, "exec", "node1", "node2", "--", "hostname") as person:
        first = person.sees(rf"(node[12]) \(\S+\): {PASSWORD}")[1]
        assert person.is_quiet(0.5)
        person.types(hosts.password)
        second = person.sees(rf"(node[12]) \(\S+\): {PASSWORD}")[1]
        assert {first, second} == {"node1", "node2"}
        person.types(hosts.password)
        assert person.ends() == 0, person.said
        assert person.said.count(": Password:") == 2


PROGRAM = """
import contextlib, getpass, os, sys
import skyfab as sky

@sky.function
def who():
    return getpass.getuser()

with sky.Compute(sys.argv[1]) as compute:
    print("first", who() >> compute)
    print("second", compute.hosts[0].connection.run("id -un", hide=True, in_stream=False).stdout)
    with contextlib.suppress(Exception):
        compute.hosts[0].connection.run("pkill -u pat sshd", hide=True, in_stream=False)
    print("third", who() >> compute)
with sky.Compute(sys.argv[1]) as compute:
    print("fourth", who() >> compute)
"""


@pytest.mark.parametrize("by", ["openssh"])
def test_a_password_is_asked_for_once_whatever_connects(hosts: Lab, inventory: Path) -> None:
    """The pool, its Fabric connection, a reconnect, and the next pool of the program."""
    (inventory.parent / "program.py").write_text(PROGRAM)
    with Typist([sys.executable, "program.py", "node1"], inventory.parent) as person:
        person.sees(PASSWORD)
        person.types(hosts.password)
        for number in ("first", "second", "third", "fourth"):
            person.sees(f"{number} pat")
        assert person.ends() == 0
        assert person.said.count("Password:") == 1


@both
def test_a_jump_host_may_ask_for_a_password(hosts: Lab, inventory: Path) -> None:
    with at_terminal(inventory, "exec", "behind", "--", "hostname") as person:
        person.sees(rf"node1 \(pat@\S+\): {PASSWORD}")
        person.types(hosts.password)
        assert person.ends() == 0, person.said
        assert "node4" in person.said
        assert person.said.count("Password:") == 1


@pytest.fixture(scope="module")
def codes(hosts: Lab) -> Iterator[str]:
    """Codes that have not been used yet."""
    return (code(hosts.password, number) for number in range(1000))


@both
def test_a_new_connection_needs_a_new_code_and_no_password(hosts: Lab, inventory: Path, codes: Iterator[str]) -> None:
    """The pool, its Fabric connection, a reconnect, and the next pool of the program. Input is not shown."""
    (inventory.parent / "program.py").write_text(PROGRAM)
    with Typist([sys.executable, "program.py", "node3"], inventory.parent) as person:
        person.sees(PASSWORD)
        person.types(hosts.password)
        for number in ("first", "second", "third", "fourth"):
            person.sees(CODE)
            person.types(next(codes))
            while not person.sees(f"{CODE}|{number} pat")[0].endswith("pat"):  # a connection that broke once more
                person.types(next(codes))
        assert person.ends() == 0
        assert person.said.count(": Password:") == 1


@both
def test_a_wrong_password_is_asked_for_again_and_not_for_ever(inventory: Path) -> None:
    with at_terminal(inventory, "exec", "node1", "--", "hostname") as person:
        person.sees(PASSWORD)
        for _ in range(2):
            person.types("wrong")
            person.sees(f"not accepted; try again: node1.*{PASSWORD}")
        person.types("wrong")
        assert person.ends() == 3
        assert re.search(r"the input was not accepted for pat@\S+ \(it accepts password\)", person.said)
        assert "hint: try: ssh " in person.said


@both
def test_ctrl_c_while_a_password_is_asked_for(inventory: Path) -> None:
    with at_terminal(inventory, "exec", "node1", "node2", "--", "hostname") as person:
        person.sees(PASSWORD)
        person.presses(b"\x03")
        assert person.ends(20) == 130, person.said
        assert person.echoes()
        assert person.said.count(": Password:") == 1


@both
def test_nobody_is_asked_by_a_host_that_takes_keys_only(inventory: Path, home: Path) -> None:
    inventory.write_text(re.sub("identity = .*", f'identity = "{home}/.ssh/id_ed25519"', inventory.read_text()))
    with at_terminal(inventory, "exec", "node5", "--", "hostname") as person:
        assert person.ends() == 3
        assert "assword:" not in person.said
        assert "no key was accepted for pat@" in person.said


@both
def test_a_passphrase_is_asked_for_once(inventory: Path, locked: Path) -> None:
    inventory.write_text(re.sub("identity = .*", f'identity = "{locked}"', inventory.read_text()))
    with at_terminal(inventory, "exec", "node4", "node5", "--", "hostname") as person:
        person.sees(f"Enter passphrase for key '{locked}': ")
        person.types("open sesame")
        assert person.ends() == 0, person.said
        assert person.said.count("Enter passphrase") == 1


# ---- without a terminal


@both
def test_without_a_terminal_nobody_is_asked_and_it_is_said_what_to_do(hosts: Lab, inventory: Path) -> None:
    for name, method in (("node1", "password"), ("node3", "keyboard-interactive")):
        ran = piped(inventory, "exec", name, "--", "hostname")
        assert ran.returncode == 3
        place = f"pat@{hosts[name].address}"
        assert f"{name}: {place} accepts only {method}, and there is no terminal for a prompt" in ran.stderr
        assert "hint: run the same command in a terminal" in ran.stderr and place in ran.stderr.partition("hint: ")[2]


def refusal(inventory: Path, name: str, **changes: object) -> sky.SkyfabError:
    found = sky.Inventory.of(inventory)
    host = replace(found.hosts[name], **changes)  # type: ignore[arg-type]
    with pytest.raises(sky.SkyfabError) as caught:
        sky.Compute(host, inventory=found).open()
    assert caught.value.host == name
    return caught.value


@pytest.fixture
def locked(hosts: Lab, tmp_path: Path) -> Path:
    """The lab's key, with a passphrase."""
    path = tmp_path / "id_locked"
    path.write_bytes(hosts.hosts[0].identity.read_bytes())
    path.chmod(0o600)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(path)], check=True, capture_output=True
    )
    return path


@both
def test_a_key_file_that_does_not_exist(inventory: Path, tmp_path: Path) -> None:
    error = refusal(inventory, "node4", identity=str(tmp_path / "id_missing"))
    assert type(error) is sky.AuthenticationRefused
    assert error.message == f"the identity does not exist or is not readable: {tmp_path}/id_missing"
    assert error.hint == f"ls -l {tmp_path}"


@both
def test_a_key_with_a_passphrase_where_nobody_can_be_asked(inventory: Path, locked: Path) -> None:
    error = refusal(inventory, "node4", identity=str(locked))
    assert type(error) is sky.AuthenticationRefused
    assert f"the key {locked} has a passphrase" in error.message
    assert error.hint == f"ssh-add {locked}"


@both
def test_a_key_that_is_refused_and_a_user_who_does_not_exist(hosts: Lab, inventory: Path, home: Path) -> None:
    key = f"{home}/.ssh/id_ed25519"
    address = hosts["node5"].address
    for user in ("pat", "nobody-here"):
        error = refusal(inventory, "node5", identity=key, user=user)
        assert type(error) is sky.AuthenticationRefused
        assert error.message == f"no key was accepted for {user}@{address} (it accepts publickey): tried {key}"
        assert error.hint == f"ssh-copy-id -i {key} -p 22 {user}@{address}"


@both
def test_a_jump_host_that_nothing_knows(inventory: Path) -> None:
    error = refusal(inventory, "node4", jump="nod1x")
    assert type(error) is sky.Unreachable
    assert "its jump host nod1x does not resolve, and neither the inventory nor ssh_config has it" in error.message
    assert error.hint == "did you mean node1? (jump = … in the inventory)"
    assert str(refusal(inventory, "node4", jump="gateway.invalid").hint).endswith(" gateway.invalid")


@both
def test_a_jump_host_that_refuses_is_told_apart_from_the_host_itself(hosts: Lab, inventory: Path, home: Path) -> None:
    key = f"{home}/.ssh/id_ed25519"
    found = sky.Inventory.of(inventory)
    jump = replace(found.hosts["node5"], identity=key)
    inventory_of = {"node5": jump, "node4": found.hosts["node4"]}
    target = replace(found.hosts["node4"], jump="node5")
    with pytest.raises(sky.AuthenticationRefused) as caught:
        sky.Compute(target, inventory=sky.Inventory(hosts=inventory_of)).open()
    place = f"pat@{hosts['node5'].address}"
    assert caught.value.message.startswith(f"its jump host node5 refused the login: no key was accepted for {place}")
    assert caught.value.hint == f"ssh-copy-id -i {key} -p 22 {place}"
    error = refusal(inventory, "node5", identity=key, jump="node4")
    assert type(error) is sky.AuthenticationRefused
    assert error.hint == f"ssh-copy-id -i {key} -p 22 -o ProxyJump={found.hosts['node4'].login} {place}"
    error = refusal(inventory, "behind")
    assert "its jump host node1 refused the login: " in error.message and "no terminal for a prompt" in error.message


@both
def test_the_key_of_a_jump_host_that_is_unknown_or_changed_is_said_to_be_its(inventory: Path) -> None:
    found = sky.Inventory.of(inventory)
    target = replace(found.hosts["node5"], jump="node4")
    for key, says in ((None, "is unknown"), (target.host_key, "is not the one on record")):
        jump = replace(found.hosts["node4"], host_key=key)
        with pytest.raises(sky.HostKeyRefused, match=f"the host key of its jump host node4 {says}") as caught:
            sky.Compute(target, inventory=sky.Inventory(hosts={"node4": jump, "node5": target})).open()
        assert "node4" in (caught.value.hint or "")
        assert caught.value.host == "node5"
