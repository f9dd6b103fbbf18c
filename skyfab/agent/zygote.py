"""The zygote: a small process that forks ranks, so that each begins warm and clean.

It has imported what every rank needs, has one thread and never touches a GPU. It is the ranks' parent: it
tells the agent how each ended, and if the agent dies it ends them all.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False  # a cold host has no time for `typing`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_PIECE = 64 * 1024
"""Bytes in a packet: what is longer comes in several. The system refuses packets of more than about 200 kB."""
_MARK, _DIGITS = "SKYFAB_FORKED", 10
_LAST, _MORE = b".", b"+"
"""How a packet begins."""


class Zygote:
    """The agent's handle on its zygote."""

    def __init__(self) -> None:
        """Forks it, in the pool's run folder."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            _run(theirs)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        """Asks for a rank with these descriptors as its source, sink, stdout and stderr; ``request["id"]`` names it."""
        self._tell(request, fds)

    def kill(self, rank: int, number: int = signal.SIGKILL, *, alone: bool = False) -> None:
        """Sends a signal to a rank and, unless `alone`, its process group.

        Only its parent can do so without ever hitting a stranger.
        """
        self._tell({"kill": rank, "signal": number, "alone": alone}, [])

    def _tell(self, document: dict[str, Any], fds: list[int]) -> None:
        data = json.dumps(document).encode()
        self._socket.setblocking(True)
        try:
            while len(data) > _PIECE:
                self._socket.send(_MORE + data[:_PIECE])
                data = data[_PIECE:]
            socket.send_fds(self._socket, [_LAST + data], fds)
        except ConnectionError:
            pass  # it is gone, and `notices` says so
        finally:
            self._socket.setblocking(False)

    def notices(self) -> list[tuple[str, int, Any]]:
        """What has happened to ranks: ("started", rank, process id), ("ended", rank, exit code), ("failed", rank, why).

        A rank that failed has never begun. Raises EOFError when the zygote is gone.
        """
        found: list[tuple[str, int, Any]] = []
        while True:
            try:
                data = self._socket.recv(_PIECE)
            except BlockingIOError:
                return found
            except ConnectionError:
                data = b""
            if not data:
                if found:
                    return found
                raise EOFError("the zygote is gone")
            found.append(tuple(json.loads(data)))

    def close(self) -> None:
        """Ends the zygote and, through it, every rank."""
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _run(control: socket.socket) -> NoReturn:
    code = 1
    try:
        _close_all_but({0, 1, 2, control.fileno()})
        _prepare()
        _serve(control, os.path.abspath("work"))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _close_all_but(keep: set[int]) -> None:
    """Closes every descriptor that a fork inherited, but these."""
    try:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not Linux
        fds = list(range(4096))
    for fd in fds:
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def _prepare() -> None:
    """Imports what every rank needs. The interpreter was started without site: catch up on it."""
    import site

    from skyfab.agent import worker

    worker.Worker  # noqa: B018  # loaded, for every worker to share
    site.main()
    gc.collect()
    gc.freeze()  # shared pages stay shared: the collector does not write to them


def _serve(control: socket.socket, cwd: str) -> None:
    alarm_in, alarm_out = os.pipe()
    for fd in (alarm_in, alarm_out):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(alarm_out, warn_on_full_buffer=False)
    children: dict[int, int] = {}
    own = {control.fileno(), alarm_in, alarm_out}
    parent = os.getpid()
    _adopt_orphans()
    try:
        _attend(control, alarm_in, children, lambda request, fds: _become_rank(request, fds, cwd, own, parent))
    finally:
        _kill(list(children))
        _end_all()  # one that still lives could write to the folder
        import shutil

        shutil.rmtree(os.path.dirname(cwd), ignore_errors=True)  # the agent may have been killed


def _attend(
    control: socket.socket,
    alarm: int,
    children: dict[int, int],
    become: Callable[[dict[str, Any], list[int]], NoReturn],
) -> None:
    """Forks and kills as the agent says, until it says no more."""
    sources = [control.fileno(), alarm]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if alarm in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(alarm, 4096)
            _reap(children, control)
        if sources[0] in ready:
            request, fds = _receive(control)
            if request is None:
                return
            if "kill" in request:
                victims = [pid for pid, rank in children.items() if rank == request["kill"]]
                if request["alone"]:
                    _signal(victims, request["signal"])
                else:
                    _kill(victims, request["signal"])
                continue
            try:
                pid = os.fork()
            except OSError as error:  # a limit of processes or of memory: that one rank is not to be
                _say(control, "failed", request["id"], str(error))
            else:
                if not pid:
                    become(request, fds)
                children[pid] = request["id"]
                _say(control, "started", request["id"], pid)
            for fd in fds:
                os.close(fd)


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next thing that the agent asks for, with what belongs to it; None at the end."""
    data = b""
    while True:
        packet, fds, _, _ = socket.recv_fds(control, len(_LAST) + _PIECE, 8)
        if not packet:
            return None, []
        data += packet[1:]
        if packet[:1] == _LAST:
            return json.loads(data), fds


def _say(control: socket.socket, *notice: object) -> None:
    with contextlib.suppress(ConnectionError):  # the agent has gone: the end of the stream follows
        control.send(json.dumps(notice).encode())


def _reap(children: dict[int, int], control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in children:
            with contextlib.suppress(OSError):  # what the rank started and left behind goes with it
                os.killpg(pid, signal.SIGKILL)
            _kill([stray for stray in _offspring() if stray not in children and _belongs(stray, children[pid])])
            _say(control, "ended", children.pop(pid), os.waitstatus_to_exitcode(status))


def _kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.killpg(pid, number)
        except OSError:  # one so young that it leads no group yet
            _signal([pid], number)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _adopt_orphans() -> None:
    """On Linux, what a rank's children leave behind becomes ours, whatever session or group it made for itself."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)


def _offspring() -> list[int]:
    """Our children, dead or alive. Nobody else can have their numbers until we have reaped them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # not Linux, or a kernel without this file
        return []


def _belongs(pid: int, rank: int) -> bool:
    """Whether a process was started by that rank, as its environment says; or forked by it, as its mark says."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = file.read().split(b"\0")
    except OSError:
        return False
    return f"SKYFAB_RANK={rank}".encode() in found or f"{_MARK}={rank:0{_DIGITS}}".encode() in found


def _mark(rank: int) -> None:
    """Writes the rank's number where the kernel keeps what this process was started with.

    A process that is forked and becomes no other program shows that, and not the variables which were set since.
    """
    import ctypes

    if len(os.environ.get(_MARK, "")) == _DIGITS:  # the launch has made room for it
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        ctypes.memmove(getenv(_MARK.encode()), f"{rank:0{_DIGITS}}".encode(), _DIGITS)
        del os.environ[_MARK]  # what is started has SKYFAB_RANK


def _end_all() -> None:
    """Kills and reaps until there is nobody left: who loses its parent comes to us."""
    while True:
        _signal(_offspring(), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _become_rank(request: dict[str, Any], fds: list[int], cwd: str, inherited: set[int], parent: int) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in inherited:
            os.close(fd)
        os.setsid()
        _die_with(parent)
        _mark(request["id"])
        source, sink, out, err, *listener = fds
        for fd in (source, sink, *listener):
            os.set_inheritable(fd, False)
        request["listener"] = listener[0] if listener else -1
        for fd, target in ((out, 1), (err, 2)):
            os.dup2(fd, target)
            os.close(fd)
        os.makedirs(cwd, mode=0o700, exist_ok=True)
        os.chdir(cwd)
        from skyfab.agent import worker

        worker.main(source, sink, request)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Linux ends this process when the zygote is killed; elsewhere the closed pipe has to do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # too late
            os._exit(1)
