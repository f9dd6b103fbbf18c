"""The first command that a host's login shell runs: it starts skyfab there, and uploads skyfab's code if needed.

It tries at once to start the link, the process that connects this stream with the agent, and requests the bundle only
if that is missing. It is bootstrap.sh, plain POSIX sh, joined to one line of characters that every login shell passes
on unchanged (no single quotes, ``!``, backslashes or newlines). Its reply is recognized after any other output, such as
that of a .bashrc.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from skyfab._util.scripts import one_line, read, spelled
from skyfab.errors import HostLost, HostUnfit
from skyfab.inventory.host import Host
from skyfab.protocol.messages import AgentHello
from skyfab.session.bundle import Bundle
from skyfab.session.shell import START, Deadline, Shell
from skyfab.ssh.base import Stream, Transport
from skyfab.ssh.logins import LOGINS, ServerBusy
from skyfab.ssh.refusals import by_hand

_LOG: Final = logging.getLogger("skyfab")
CONNECT: Final = 30.0
"""Seconds from the first byte to the agent's hello."""
_OWN: Final = "choose another folder that you own (cache = … in the inventory)"
CACHE_HINT: Final = f"free some space on it, or {_OWN}"
_SCRIPT: Final = one_line(read("session/bootstrap.sh"))
_SETUP: Final = one_line(read("session/setup.sh"))
_UNPACK: Final = read("session/unpack.py").encode()
_OTHER: Final = 'name one that the host has: Image(python="/usr/bin/python3"), or python = … in the inventory'


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """Starts a pool's agent on one host, or connects to it again."""

    host: Host
    session: str
    """A random name. It also marks replies, so that no banner can be mistaken for one."""
    bundle: Bundle
    python: str
    """A path on the host, or major.minor, or ``any`` from 3.10 on, or ``env/DIGEST/BOOT``, or ``none``."""
    prepare: Callable[[Shell], str | None] | None = None
    """Installs a missing interpreter, has the shell start it (`Shell.go`), and returns the shell's reply."""
    setup: str = ""
    """Shell lines that run first, in a login shell."""

    @property
    def marker(self) -> str:
        return f"=skyfab={self.session}="

    def command(self, mode: Literal["start", "resume", "ask"] = "start") -> str:
        """The command line for the host's login shell."""
        words = (self.host.cache, self.python, self.bundle.digest, self.session, mode)
        command = f"'{_SCRIPT}' skyfab " + " ".join(f"'{spelled(word)}'" for word in words)
        if not self.setup:
            return f"exec /bin/sh -c {command}"
        # The first shell keeps stdin away from what a login shell reads.
        login = 'exec 3<&0 </dev/null; b=$(command -v bash) || b=/bin/sh; exec "$b" -l -c "$@"'
        lines = spelled(self.setup.replace("\\\n", " ") + "\n")
        return f"exec /bin/sh -c '{login}' skyfab '{_SETUP}' skyfab '{spelled(chr(10))}' '{lines}' {command}"

    def join(
        self,
        stream: Stream,
        *,
        deadline: float,
        stopped: Callable[[], bool] = lambda: False,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the shell's reply and sends what it requests; afterwards the stream carries frames.

        `arrived` is called when the host has sent anything.
        Raises HostUnfit if the host cannot run skyfab, or the transport's error for a lost connection.
        """
        _LOG.debug("%s: waiting for the login", self.host.name)
        shell = Shell(stream, self.marker, Deadline(self.host, deadline, stopped, arrived))
        asked = is_sent = False
        ahead: str | None = None
        if self.python == "none" and self.prepare is not None:
            asked = True
            shell.greeting = lambda: _greet(stream, shell)
            ahead = self.prepare(shell)
        while True:
            answer, ahead = ahead or shell.answer(), None
            if answer is None:
                raise cannot_run(stream.explain(), self.host) if asked else _silence(stream, shell)
            word, _, detail = answer.partition(" ")
            if word == "link":
                _LOG.debug("%s: logged in; waiting for its agent", self.host.name)
                return
            if word == "setup":
                raise _setup_failed(detail, self.host)
            if word == "python":
                asked = True
            elif word == "bundle" and not is_sent:
                is_sent = True
                _LOG.debug("%s: logged in; sending skyfab", self.host.name)
                asked = True
                self._push(shell)
            elif word == "nopython" and self.prepare is not None and not asked:
                asked = True
                ahead = self.prepare(shell)
            elif word == "nopython":
                what = f"no Python {self.python} found" if self.python[0] != "/" else f"no interpreter at {self.python}"
                where = f" in {self.host.inside}" if self.host.inside else ""
                raise HostUnfit(what + where, host=self.host.name, hint=_OTHER)
            else:
                why = detail or f"unexpected reply {word!r:.80}"
                raise HostUnfit(f"cannot set up skyfab: {why}", host=self.host.name, hint=_hint(detail))

    def _push(self, shell: Shell) -> None:
        archive = self.bundle.archive
        shell.send(b"%d\n%b%d\n%b" % (len(_UNPACK), _UNPACK, len(archive), archive))


def _greet(stream: Stream, shell: Shell) -> None:
    answer = shell.answer()
    if answer is None:
        raise _silence(stream, shell)
    _LOG.debug("%s: logged in", shell.host.name)
    word, _, detail = answer.partition(" ")
    if word == "setup":
        raise _setup_failed(detail, shell.host)
    if word == "failed":
        raise HostUnfit(detail, host=shell.host.name, hint=_hint(detail))


def _hint(detail: str) -> str | None:
    """What to do about a cache folder: bootstrap.sh names the folder if its owner or mode is the reason."""
    return (_OWN if "its cache folder " in detail else CACHE_HINT) if detail else None


def _setup_failed(detail: str, host: Host) -> HostUnfit:
    """The error for a setup line: its exit status, the line and its output, both in hexadecimal."""
    status, line, output = [*detail.split(" "), "", "", ""][:3]
    by = "" if host.transport == "local" or host.inside else f"; by hand: {by_hand(host, 'bash -l')}"
    command, printed = [re.sub(r"[^\n -~\xa0-\uffff]", "", _unhex(text)).strip() for text in (line, output)]
    return HostUnfit(
        f"its setup failed: {command!r} exited with {status[:3]}" + (f"\n{printed}" if printed else ""),
        host=host.name,
        hint=f"setup = … in the inventory, or Image(setup=…){by}",
    )


def _unhex(text: str) -> str:
    return bytes.fromhex(text).decode(errors="replace") if re.fullmatch("([0-9a-f]{2})*", text) else ""


def _silence(stream: Stream, shell: Shell) -> Exception:
    error, host = stream.explain(), shell.host
    if isinstance(error, HostLost):
        said = shell.noise.decode(errors="replace").strip() or error.message.partition(": ")[2]
        return HostUnfit(
            f"its login shell did not run our command{'; it said: ' + said[-400:] if said else ''}",
            host=host.name,
            hint=f"try: {by_hand(host, 'true')}",
        )
    return error


def cannot_run(error: Exception, host: Host) -> Exception:
    """Our script ran, but the interpreter that it started exited: the error is about the interpreter."""
    if isinstance(error, HostLost):
        said = error.message.partition(": ")[2]
        if said.startswith("skyfab: "):  # written by the link itself
            text = said.removeprefix("skyfab: ")
            return HostUnfit(f"cannot set up skyfab: {text}", host=host.name, hint=CACHE_HINT)
        old = re.match(r"\d+\.\d+\.\d+", said)
        if old:
            return other_python(old[0], host)
        return HostUnfit(f"its Python cannot run skyfab{': ' + said if said else ''}", host=host.name, hint=_OTHER)
    return error


def other_python(version: str, host: Host) -> HostUnfit:
    """Functions are sent as bytecode: both sides must run the same Python version."""
    return HostUnfit(
        f"it runs Python {version}: hosts must run the same Python minor version as this machine, {local_python()}",
        host=host.name,
        hint=f'name a Python {local_python()} on the host: Image(python="/path/to/python{local_python()}")',
    )


def check_agent(agent: AgentHello, host: Host) -> None:
    """Checks the version before anything is unpickled: functions are sent as bytecode."""
    if agent.python != local_python():
        raise other_python(agent.python, host)


def local_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def log_in(
    launch: Bootstrap, transport: Transport, mode: Literal["start", "ask"], stopped: Callable[[], bool]
) -> tuple[Stream, float]:
    """Starts the link on the host; then the stream carries frames. Returns it, and the deadline for its first frame.

    Raises a HostError, and ServerBusy, after which another attempt may succeed; the transport is closed then.
    """
    stream: Stream | None = None
    try:
        with LOGINS.turn(transport.servers, stopped) as turn:
            stream = transport.open(launch.command(mode), stopped)
            deadline = time.monotonic() + CONNECT
            launch.join(stream, deadline=deadline, stopped=stopped, arrived=turn.close)
        transport.joined()
    except BaseException as error:
        if isinstance(error, ServerBusy):
            LOGINS.turned_away(transport.servers)
        if stream is not None:
            stream.close()
        transport.close()
        raise
    return stream, max(deadline, time.monotonic() + CONNECT)  # creating an environment may have taken long


@contextmanager
def open_shell(host: Host, transport: Transport) -> Iterator[Shell]:
    """Opens a shell on a host, which needs no Python; in scripts `$c` is the path of the cache folder."""
    _LOG.debug("%s: waiting for a shell", host.name)
    launch = Bootstrap(host=host, session=os.urandom(8).hex(), bundle=Bundle("none", ()), python="none")
    with LOGINS.turn(transport.servers) as turn:
        try:
            stream = transport.open(launch.command())
        except BaseException:
            transport.close()
            raise
        try:
            deadline = Deadline(host, time.monotonic() + START, bool, turn.close)
            shell = Shell(stream, launch.marker, deadline)
            shell.greeting = lambda: _greet(stream, shell)
            yield shell
        finally:
            stream.close()
            transport.close()
