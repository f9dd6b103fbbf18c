"""A paramiko client that asks for passwords, one-time codes and passphrases if the server requires them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import paramiko

from skyfab.errors import HostError
from skyfab.ssh import keys
from skyfab.ssh.prompts import Place, Prompts
from skyfab.ui.prompt import TERMINAL

_TYPED: Final = ("keyboard-interactive", "password")
"""The methods for which the user is asked, in the order in which they are tried, as ssh does."""
_TRIES: Final = 3
"""As many times is asked again after a wrong answer, in all, as by ssh."""
_GRACE: Final = 150.0
"""Seconds in which a server must reply to what was typed; they count from its question."""


class Refused(paramiko.AuthenticationException):  # type: ignore[misc]  # paramiko has no type hints
    """The server rejected the login; it takes these methods."""

    def __init__(self, methods: Sequence[str], error: Exception) -> None:
        super().__init__(str(error))
        self.methods = methods


class _More(paramiko.SSHException):  # type: ignore[misc]
    """The key was accepted, and the server wants a password or code too."""


class Client(paramiko.SSHClient):  # type: ignore[misc]
    """Connects to one server, which may be a jump host. Raises what `explain` makes of an error."""

    def __init__(self, place: Place, prompts: Prompts, explain: Callable[[Exception], HostError]) -> None:
        super().__init__()
        self._agent: Any = None
        self._place = place
        self._prompts = prompts
        self._explain = explain

    def connect(self, *args: Any, **keywords: Any) -> None:
        try:
            super().connect(*args, **keywords)
        except HostError:  # of a jump host
            raise
        except Exception as error:
            raise self._explain(error) from error

    def _auth(self, username: str, password: None, pkey: Any, files: Any, *rest: Any) -> None:
        """Logs in with keys, else by what the server takes and the user types."""
        transport: Any = self._transport
        methods = _offered(transport, username)
        if transport.is_authenticated():
            return
        refusal: Exception = paramiko.AuthenticationException("no key is accepted")
        if "publickey" in methods or not methods:
            transport.auth_interactive_dumb = _ask_no_further  # paramiko would call input()
            try:
                pkey, files = self._unlocked(pkey, files)
                super()._auth(username, password, pkey, files, *rest)
                return
            except _More as error:
                methods, refusal = _TYPED, error
            except paramiko.SSHException as error:
                if not transport.is_active():
                    raise
                refusal = error
        self._type(transport, username, methods, refusal)

    def _unlocked(self, pkey: Any, files: Sequence[str]) -> tuple[Any, Sequence[str]]:
        """The keys to try. One with a passphrase is taken from the ssh-agent, else its passphrase is asked for."""
        for file in files if pkey is None else ():
            if not _is_locked(file):
                continue
            self._agent = self._agent or paramiko.Agent()  # closed with the client
            own = keys.fingerprint(Path(file))
            held = [key for key in self._agent.get_keys() if key.fingerprint == own]
            if held:
                return held[0], ()
            for _ in range(_TRIES if TERMINAL.is_attended() else 0):
                phrase = self._prompts.answer("", f"Enter passphrase for key '{file}': ")
                if phrase is None:
                    break
                try:
                    return paramiko.PKey.from_path(file, phrase.encode(errors="surrogateescape")), ()
                except (paramiko.SSHException, ValueError):
                    pass
            self._prompts.refused()
        return pkey, files

    def _type(self, transport: Any, username: str, methods: Sequence[str], refusal: Exception) -> None:
        tries = 0
        while tries < _TRIES:
            method = next((method for method in _TYPED if method in methods), None)
            if method is None or self._prompts.declined or not transport.is_active() or not TERMINAL.is_attended():
                break
            try:
                left = self._try(transport, username, method)
            except paramiko.BadAuthenticationType as error:
                methods, refusal = [one for one in error.allowed_types if one != method], error
            except paramiko.SSHException as error:
                tries, refusal = tries + 1, error
            else:
                if not left:
                    return
                methods = left
        self._prompts.refused()
        raise Refused(methods, refusal)

    def _try(self, transport: Any, username: str, method: str) -> list[str]:
        """Returns the methods that the server wants besides."""
        if method == "password":
            password = self._prompts.answer(self._place, "Password: ")
            if password is None:
                raise paramiko.AuthenticationException("no input")
            return list(transport.auth_password(username, password, fallback=False))
        transport.auth_timeout = _GRACE
        return list(transport.auth_interactive(username, self._answers))

    def _answers(self, title: str, instructions: str, prompts: Sequence[tuple[str, bool]]) -> list[str]:
        """Answers a server's prompts, on the transport's thread."""
        return [self._prompts.answer(self._place, text) or "" for text, _ in prompts]


def _is_locked(file: str) -> bool:
    """Whether the key has a passphrase. Other problems are found by those who use it."""
    try:
        paramiko.PKey.from_path(file)
    except TypeError:  # of cryptography
        return True
    except Exception:
        return False
    return False


def _offered(transport: Any, username: str) -> Sequence[str]:
    """The methods that the server takes: asking first costs none of the tries that it allows."""
    try:
        transport.auth_none(username)
    except paramiko.BadAuthenticationType as error:
        found: list[str] = error.allowed_types
        return found
    return ()


def _ask_no_further(*_: Any) -> None:
    raise _More
