"""The link: the program that sshd runs for each connection; it attaches the connection to the pool's agent.

It starts the agent if necessary, passes it its stdin and stdout over a Unix socket, and sleeps until the agent closes
the socket. So no process copies data between sshd and the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
import sys

from skyfab.protocol import NO_AGENT

SOCKET = "agent.sock"
_LONGEST_WAIT = 60
"""Seconds for connecting to the agent. The client waits less long."""
_LONGEST = 4096
"""The longest message of an agent that cannot start."""


class _AgentGone(ConnectionError):
    def __str__(self) -> str:
        return "the pool's agent no longer runs on this host"


def main(argv: list[str]) -> int:
    """``link CACHE SESSION start|resume|ask``. The bootstrap has already written the marker line for success."""
    cache, session, mode = argv
    if mode == "ask":
        from skyfab.host.ask.serve import serve

        _touch(cache, "bundles", bundle_folder())
        serve(cache)
    held = os.pipe() if mode == "start" and "SINGULARITY_CONTAINER" in os.environ else None
    signal.alarm(_LONGEST_WAIT)  # ends this process: an agent that hangs does not accept connections
    try:
        _enter_folder(cache, session, make=mode == "start")
        agent = _agent(cache, session, may_start=mode == "start")
    except OSError as error:
        print(f"skyfab: {error}", file=sys.stderr)
        return NO_AGENT if isinstance(error, _AgentGone) else 1
    signal.alarm(0)
    about = {"connection": os.environ.get("SSH_CONNECTION", "")}
    with contextlib.suppress(ConnectionError):  # it terminates, and says why
        socket.send_fds(agent, [json.dumps(about).encode()], [0, 1])
    for fd in (0, 1):
        os.close(fd)
    try:
        said = agent.recv(_LONGEST).decode(errors="replace")  # until the agent closes the socket or terminates
    except ConnectionError:
        said = f"the agent has ended, see {cache}/logs/{session}/agent.log"
    if said:
        print(f"skyfab: {said}", file=sys.stderr)
    if held is not None:  # apptainer unmounts the image when its first process ends: this one waits for the agent
        os.close(held[1])
        os.read(held[0], 1)
    return 1 if said else 0


def _enter_folder(cache: str, session: str, *, make: bool) -> None:
    """Creates the pool's run folder and changes to it: the length of socket paths is limited, so they are relative.

    The path contains the host name, because hosts may share a home folder. The bootstrap script has checked that no
    other user can replace the cache folder.
    """
    folder = os.path.join(cache, "run", socket.gethostname(), session)
    if make:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    elif not os.path.isdir(folder):
        raise _AgentGone
    os.chdir(folder)
    found = os.stat(".")
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} belongs to another user or is accessible to others")


def _agent(cache: str, session: str, *, may_start: bool) -> socket.socket:
    """Connects to the agent's socket, and starts the agent if it does not run."""
    with open("lock", "w") as lock:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # two links may start at once
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(SOCKET)
            return client
        except (FileNotFoundError, ConnectionRefusedError):
            if not may_start:
                raise _AgentGone from None
        if os.path.lexists(SOCKET):
            os.unlink(SOCKET)
        _note_uses(cache)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(SOCKET)
        listener.listen(8)
        _start(listener, cache, session, inherited=(lock.fileno(), client.fileno()))
        client.connect(SOCKET)
        return client


def _note_uses(cache: str) -> None:
    """Notes in the run folder which environment and bundle of the cache are in use, so that ``skyfab gc`` keeps them.

    The bundle is written last: if that note is missing, as on a full disk, gc must assume that anything may be in use.
    """
    env = os.path.dirname(os.path.dirname(sys.executable))  # without site, sys.prefix is not the environment's
    for note, kind, folder, used in (("env", "envs", env, ".used"), ("bundle", "bundles", bundle_folder(), "")):
        name = _touch(cache, kind, folder, used)
        with contextlib.suppress(OSError), open(note, "w") as file:
            file.write(f"{name}\n")


def bundle_folder() -> str:
    """The folder that this module was loaded from."""
    return os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))


def _touch(cache: str, kind: str, folder: str, used: str = "") -> str:
    """Notes that an entry of the cache is used now. Returns its name, empty if the folder is not in the cache."""
    name = ""
    with contextlib.suppress(OSError):
        if os.path.samefile(os.path.dirname(folder), os.path.join(cache, kind)):
            name = os.path.basename(folder)
            os.utime(os.path.join(folder, used))
    return name


def _start(listener: socket.socket, cache: str, session: str, *, inherited: tuple[int, ...]) -> None:
    """Forks the agent as a daemon: no terminal, no waiting parent, none of our descriptors."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for fd in inherited:
        os.close(fd)
    nowhere = os.open(os.devnull, os.O_RDWR)
    logs = os.path.join(cache, "logs", session)
    os.makedirs(logs, mode=0o700, exist_ok=True)
    log = os.open(os.path.join(logs, "agent.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, target in ((nowhere, 0), (nowhere, 1), (log, 2)):
        os.dup2(fd, target)
    os.close(nowhere)
    os.close(log)
    code = 1
    try:
        from skyfab.host.agent.zygote import Zygote

        zygote = Zygote()  # first, because its imports take longest
        from skyfab.host.agent.agent import Agent

        Agent(listener, zygote, cache=cache, session=session).run()
        code = 0
    except BaseException as error:
        import traceback

        _tell(listener, f"{type(error).__name__}: {error}")
        traceback.print_exc()  # last: on a full disk it fails
    finally:
        os._exit(code)


def _tell(listener: socket.socket, text: str) -> None:
    """Sends the link that waits for this agent the reason why it cannot start."""
    with contextlib.suppress(OSError):
        listener.settimeout(1)
        listener.accept()[0].sendall(text.encode()[:_LONGEST])
