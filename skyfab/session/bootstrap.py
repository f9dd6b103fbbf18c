"""The launch: the first command that a host's shell is given, and how it answers.

It is optimistic: it starts the link of this bundle at once, and asks for the bundle only where that is
missing. It is plain POSIX sh, in words that every login shell passes on unchanged (no quotes, ``!``, backslashes
or newlines inside), and finds its answer in whatever a .bashrc prints first.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from skyfab.errors import HostLost, HostUnfit
from skyfab.inventory.host import Host
from skyfab.protocol.blobs import name_of
from skyfab.protocol.messages import AgentHello
from skyfab.session.bundle import Bundle
from skyfab.session.shell import LOOP, START, Deadline, Shell
from skyfab.session.transport.base import Stream, Transport
from skyfab.session.transport.logins import LOGINS
from skyfab.session.transport.openssh import by_hand

_SCRIPT: Final = "; ".join(
    (
        "SKYFAB_UMASK=$(umask)",
        "export SKYFAB_UMASK",
        "umask 077",
        "SKYFAB_FORKED=0000000000",  # room for a number, see zygote
        "export SKYFAB_FORKED",
        "d() { printf %bx $1; }",
        "c=$(d $1)",
        "c=${c%x}",
        "p=$(d $2)",
        "p=${p%x}",
        "d=$3 i=$4 k=$5",
        'm="=sky""fab=$i="',
        'case $c in /*) ;; "~") c=$HOME;; "~/"*) c=$HOME/${c#"~/"};; *) c=$HOME/$c;; esac',
        # Who can write there could have put a bundle of their own in it. It is made first:
        # another user could make it between the check and its use.
        'test -d "$c" || mkdir -p "$c" 2>/dev/null',
        'if test -e "$c"; then case $(ls -ldL "$c") in ?????w*|????????w*) r="is open to others";;'
        ' *) test -O "$c" && r= || r="belongs to somebody else";; esac;'
        ' test -z "$r" || { echo "${m}failed its cache folder $r: $c"; exit; }; fi',
        # What is asked for: an interpreter's path, an environment (as long as the machine has not been started again
        # since it was chosen), or a version.
        "case $p in /*) ;; none) p=;; env/*) p=${p#env/}; r=${p#*/}; e=$c/envs/${p%%/*}; p=;"
        ' read o </proc/sys/kernel/random/boot_id && test "$o" = "$r" && p=$e/bin/python && true >"$e/.used" ;;'
        ' *) v=$p; p=$(command -v "python$v") || for q in python3 python; do p=$(command -v $q) &&'
        ' test "$("$p" -Sc "import sys;print(*sys.version_info[:2],sep=chr(46))")" = $v && break; p=; done;;'
        " esac 2>/dev/null",
        'go() { b=$c/bundles/$d; if test -f "$b/__main__.py" && test -O "$b/__main__.py"; then'
        ' echo "${m}link"; exec "$p" -S "$b" "$c" $i $k; fi;'
        ' echo "${m}bundle"; exec "$p" -S -c "import sys;sys.version_info<(3,10) and sys.exit(sys.version.split()[0]);'
        'f=sys.stdin.buffer;exec(f.read(int(f.readline())))" "$c" $d $i $k; }',
        'test -f "$p" && test -x "$p" && go',
        'echo "${m}nopython"',
        LOOP,
    )
)

_UNPACK: Final = """
import hashlib, io, os, shutil, tarfile
cache, digest, session, mode = sys.argv[1:]
def say(text):
    print("=sky" + "fab=" + session + "=" + text.replace(chr(10), " "), flush=True)
target = os.path.join(cache, "bundles", digest)
try:
    size, checksum = f.readline().decode().split()
    content = f.read(int(size))
    if hashlib.sha256(content).hexdigest() != checksum:
        raise OSError("the bundle arrived damaged")
    draft = target + "." + session
    os.makedirs(draft, mode=0o700)
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for entry in tar:
                path = os.path.join(draft, entry.name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(tar.extractfile(entry).read())
        if not os.path.isdir(target):
            os.rename(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
except OSError as error:
    if not os.path.isdir(target):
        say("failed " + str(error))
        sys.exit(0)
if os.stat(target).st_uid != os.getuid():
    say("failed its cache folder belongs to somebody else: " + cache)
    sys.exit(0)
say("link")
os.execv(sys.executable, [sys.executable, "-S", target, cache, session, mode])
"""
_OTHER: Final = 'name one that is there: Image(python="/usr/bin/python3"), or python = … in the inventory'


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """How one pool's agent is started on one host, or found again."""

    host: Host
    session: str
    """A random name: it also marks the answer, so that no banner can be taken for it."""
    bundle: Bundle
    python: str
    """A path on the host, or major.minor, or ``env/DIGEST/BOOT``, or ``none``."""
    prepare: Callable[[Shell], str | None] | None = None
    """Makes an interpreter where that is not there, has the shell start it (`Shell.go`), and returns its answer."""

    @property
    def marker(self) -> str:
        return f"=skyfab={self.session}="

    def command(self, mode: Literal["start", "resume"] = "start") -> str:
        """The line for the host's login shell."""
        words = (self.host.cache, self.python, self.bundle.digest, self.session, mode)
        return f"exec /bin/sh -c '{_SCRIPT}' skyfab " + " ".join(f"'{spelled(word)}'" for word in words)

    def join(
        self,
        stream: Stream,
        *,
        deadline: float,
        stopped: Callable[[], bool] = lambda: False,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the answer and sends what is asked for; afterwards the stream speaks frames.

        `arrived` is called when the host has said something.
        Raises HostUnfit where the host cannot run us, or what the transport says of a lost connection.
        """
        shell = Shell(stream, self.marker, Deadline(self.host, deadline, stopped, arrived))
        asked = False
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
                return
            if word == "bundle":
                asked = True
                self._push(shell)
            elif word == "nopython" and self.prepare is not None and not asked:
                asked = True
                ahead = self.prepare(shell)
            elif word == "nopython":
                raise HostUnfit(
                    f"no Python {self.python} there" if self.python[0] != "/" else f"no interpreter at {self.python}",
                    host=self.host.name,
                    hint=_OTHER,
                )
            else:
                raise HostUnfit(f"skyfab could not be set up there: {detail}", host=self.host.name, hint=_room(detail))

    def _push(self, shell: Shell) -> None:
        archive = self.bundle.archive
        shell.send(f"{len(_UNPACK)}\n{_UNPACK}{len(archive)} {name_of(archive)}\n".encode() + archive)


def _room(detail: str) -> str | None:
    if "No space left" in detail or "quota" in detail:
        return "free some space there, or put the cache on another disk (cache = … in the inventory)"
    if "is open to others" in detail:
        return "chmod 700 it there, if nobody has put anything in it, or choose another (cache = … in the inventory)"
    if "belongs to somebody else" in detail:
        return "choose one of your own (cache = … in the inventory)"
    if any(word in detail for word in ("Read-only", "Permission denied", "Not a directory", "File exists")):
        return "choose a folder that can be written to (cache = … in the inventory)"
    return None


def spelled(word: str) -> str:
    """`word` in characters that no shell touches; ``printf %b`` reads it back."""
    return re.sub(r"[^A-Za-z0-9/._~-]", lambda m: "".join(f"\\0{byte:03o}" for byte in os.fsencode(m[0])), word)


def _greet(stream: Stream, shell: Shell) -> None:
    answer = shell.answer()
    if answer is None:
        raise _silence(stream, shell)
    word, _, detail = answer.partition(" ")
    if word == "failed":
        raise HostUnfit(detail, host=shell.host.name, hint=_room(detail))


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
    """Our shell script ran, and the interpreter that it started ended: that is the interpreter's doing."""
    if isinstance(error, HostLost):
        said = error.message.partition(": ")[2]
        if said.startswith("skyfab: "):  # the link itself
            text = said.removeprefix("skyfab: ")
            return HostUnfit(f"skyfab could not be set up there: {text}", host=host.name, hint=_room(text))
        old = re.match(r"\d+\.\d+\.\d+", said)
        if old:
            return other_python(old[0], host)
        return HostUnfit(f"its Python cannot run skyfab{': ' + said if said else ''}", host=host.name, hint=_OTHER)
    return error


def other_python(version: str, host: Host) -> HostUnfit:
    """Functions travel as byte code: the interpreters must agree."""
    return HostUnfit(
        f"it runs Python {version}, this program {local_python()}: functions cannot travel between them",
        host=host.name,
        hint=f'name an interpreter {local_python()} there: Image(python="/path/to/python{local_python()}")',
    )


def check_agent(agent: AgentHello, host: Host) -> None:
    """Functions travel as byte code: the interpreters must agree before anything is unpickled."""
    import cloudpickle

    if agent.python != local_python():
        raise other_python(agent.python, host)
    if agent.cloudpickle != cloudpickle.__version__:
        raise HostUnfit(
            f"it has cloudpickle {agent.cloudpickle}, this program {cloudpickle.__version__}",
            host=host.name,
            hint="make them the same version",
        )


def local_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


@contextmanager
def open_shell(
    host: Host,
    transport: Transport,
    *,
    stopped: Callable[[], bool] = lambda: False,
    quiet: float = float("inf"),
) -> Iterator[Shell]:
    """A shell on a host that needs nothing but a shell; `$c` is the cache folder's path in its scripts.

    A script that says nothing for `quiet` seconds is given up.
    """
    launch = Bootstrap(host=host, session=secrets.token_hex(8), bundle=Bundle("none", ()), python="none")
    with LOGINS.turn(transport.servers, stopped) as turn:
        try:
            stream = transport.open(launch.command())
        except BaseException:
            transport.close()
            raise
        try:
            patience = Deadline(host, time.monotonic() + START, stopped, turn.over)
            shell = Shell(stream, launch.marker, patience, quiet)
            shell.greeting = lambda: _greet(stream, shell)
            yield shell
        finally:
            stream.close()
            transport.close()
