"""What logins ask: which server a question is about, what is remembered, and for whom."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable

import pytest

import skyfab as sky
from skyfab.ssh import openssh, prompts
from skyfab.ssh.askpass import private_folder
from skyfab.ssh.openssh import OpenSSH
from skyfab.ssh.prompts import Place, Prompts, by_ssh
from skyfab.ui.prompt import TERMINAL

NODE = Place(name="node1", login="ada@10.0.0.1")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is asked; the answers are 1, 2, 3 …"""
    asked: list[str] = []

    def ask(question: str, stopped: Callable[[], bool]) -> str | None:
        if stopped():
            return None
        asked.append(question)
        return str(len(asked))

    monkeypatch.setattr(TERMINAL, "ask", ask)
    monkeypatch.setattr(prompts, "_ANSWERS", prompts._Answers())
    monkeypatch.setattr(prompts, "_SECOND", 0.0)
    return asked


@pytest.mark.parametrize(
    ("prompt", "who", "text"),
    [
        ("ada@10.0.0.1's password: ", "ada@10.0.0.1", "Password: "),
        ("(ada@10.0.0.1) Verification code: ", "ada@10.0.0.1", "Verification code: "),
        ("(ada@10.0.0.1) bob@gateway's password: ", "ada@10.0.0.1", "bob@gateway's password: "),
        ("(ada@10.0.0.1) (bob@gateway) Password: ", "ada@10.0.0.1", "(bob@gateway) Password: "),
        ("(ada@10.0.0.1) two\nlines: ", "ada@10.0.0.1", "two\nlines: "),
        ("Enter passphrase for key '/home/ada/.ssh/id': ", "", "Enter passphrase for key '/home/ada/.ssh/id': "),
    ],
)
def test_a_server_cannot_ask_in_the_name_of_another(prompt: str, who: str, text: str) -> None:
    assert by_ssh(prompt) == (who, text)


def test_a_password_is_remembered_and_a_code_is_not(typed: list[str]) -> None:
    for _ in range(2):
        login = Prompts()
        assert login.answer(NODE, "Password: ") == "1"
    before = len(typed)
    for text in ("Verification code: ", "One-time password (OATH) for `ada': ", "Password & token: ", "Duo passcode: "):
        assert Prompts().answer(NODE, text) != Prompts().answer(NODE, text)
    assert len(typed) == before + 8


def test_the_same_question_again_means_that_the_answer_was_wrong(typed: list[str]) -> None:
    first, second = Prompts(), Prompts()
    assert (first.answer(NODE, "Password: "), second.answer(NODE, "Password: ")) == ("1", "1")
    assert first.answer(NODE, "Password: ") == "2"
    assert second.answer(NODE, "Password: ") == "2", "it is given what was typed meanwhile"
    assert typed == ["node1 (ada@10.0.0.1): Password: ", "not accepted; try again: node1 (ada@10.0.0.1): Password: "]
    second.refused()
    assert Prompts().answer(NODE, "Password: ") == "3"


def test_a_login_that_is_not_wanted_any_more_asks_nothing_and_forgets_nothing(typed: list[str]) -> None:
    assert Prompts().answer(NODE, "Password: ") == "1"
    ended = Prompts(lambda: True)
    assert ended.answer(NODE, "Password: ") == "1"
    assert ended.answer(NODE, "Code: ") is None
    assert ended.outcome == "there was no input in time"
    ended.refused()
    assert Prompts().answer(NODE, "Password: ") == "1"
    assert len(typed) == 1


def test_a_socket_of_ssh_has_a_short_name_in_a_long_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh binds it with a suffix first."""
    with tempfile.TemporaryDirectory(prefix="x" * 51, dir="/tmp") as base:
        assert len(base) == 64
        monkeypatch.setattr(tempfile, "tempdir", base)
        folder = private_folder()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket.{'x' * 16}")
        shutil.rmtree(folder)


def login(*hosts: sky.Host) -> OpenSSH:
    *_, target = hosts
    return OpenSSH(target, sky.Inventory(hosts={host.name: host for host in hosts}))


def test_a_password_goes_to_no_other_server_of_the_path(typed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwarded ports of one address look alike in ssh's prompts; an old ssh does not say who asks."""
    jump = sky.Host(name="gateway", address="127.0.0.1", port=2201, user="ada")
    target = sky.Host(name="node1", address="127.0.0.1", port=2202, user="ada", jump="gateway")
    other = sky.Host(name="node2", address="10.0.0.2", user="ada", jump="gateway")

    def never() -> bool:
        return False

    assert login(jump, other)._answer("ada@127.0.0.1's password: ", never) == "1"
    assert login(jump, other)._answer("ada@127.0.0.1's password: ", never) == "1"
    assert login(jump, other)._answer("ada@10.0.0.2's password: ", never) == "2"
    assert login(jump, target)._answer("ada@127.0.0.1's password: ", never) == "3"
    monkeypatch.setattr(openssh, "_version", lambda: (8, 4))
    assert login(jump, other)._answer("ada@127.0.0.1's password: ", never) == "4"
