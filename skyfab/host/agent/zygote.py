"""The zygote: a small process that forks workers, so that they start fast and in a clean state.

It has imported what every worker needs, has one thread and never uses a GPU. It is the parent of the workers: it
reports to the agent how each one exited, and kills them all if the agent terminates.
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

from skyfab.host.agent.processes import SUBREAPER, end_children, has_variable, kill, offspring, prctl, send, send_groups

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_PIECE = 64 * 1024
"""Bytes in a packet; longer data is split. The system refuses packets of more than about 200 kB."""
_MOST_FDS = 4096
"""Descriptors of an agent without workers have lower numbers."""
_MARK, _DIGITS = "SKYFAB_FORKED", 10
_LAST, _MORE = b".", b"+"
"""The first byte of a packet: the last one of a request, or more follow."""


class Zygote:
    """The agent's handle of its zygote process."""

    def __init__(self) -> None:
        """Forks the zygote, in the pool's run folder."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            _end_after(_serve, theirs)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        """Requests a worker with these descriptors: source, sink, stdout, stderr and optionally a listening socket.

        ``request["id"]`` identifies it.
        """
        self._tell(request, fds)

    def kill(self, rank: int, number: int = signal.SIGKILL, *, alone: bool = False) -> None:
        """Sends a signal to a worker and, unless `alone`, to its process group.

        The zygote does it, because only the parent can be certain that the pid has not been reused.
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
            pass  # the zygote has terminated; `notices` reports it
        finally:
            self._socket.setblocking(False)

    def notices(self) -> list[tuple[str, int, Any]]:
        """Events of workers: ("started", id, pid), ("ended", id, exit code), ("failed", id, error).

        A worker that failed could not be forked. Raises EOFError when the zygote has terminated.
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
        """Terminates the zygote and, through it, every worker."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)  # a function may have stopped it
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _end_after(body: Callable[..., None], *arguments: Any) -> NoReturn:
    """What a forked process does: it calls `body` and exits."""
    code = 1
    try:
        body(*arguments)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _prepare() -> None:
    """Imports what every worker needs, and runs `site`, without which the interpreter was started."""
    import site

    from skyfab.host import compiled, hub  # noqa: F401
    from skyfab.host.agent import worker

    worker.Worker  # noqa: B018  # imported before the fork, so that workers share its memory
    site.main()
    compiled.key()
    gc.collect()
    gc.freeze()  # the garbage collector then does not write to shared pages


def _serve(control: socket.socket) -> None:
    os.closerange(3, control.fileno())  # what it has inherited
    os.closerange(control.fileno() + 1, _MOST_FDS)
    _prepare()
    cwd = os.path.abspath("work")
    wakeup_in, wakeup_out = os.pipe()
    for fd in (wakeup_in, wakeup_out):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a new worker may be interrupted before it has its own handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a later zygote inherits the agent's handler, and so would workers
    signal.set_wakeup_fd(wakeup_out, warn_on_full_buffer=False)
    children: dict[int, int] = {}
    own = {control.fileno(), wakeup_in, wakeup_out}
    parent = os.getpid()
    prctl(SUBREAPER, 1)  # orphaned descendants of workers become our children, whatever session or group they are in
    try:
        _attend(control, wakeup_in, children, lambda request, fds: _become_worker(request, fds, cwd, own, parent))
    finally:
        kill(list(children))
        end_children()  # a process that still runs could write to the folder
        import shutil

        shutil.rmtree(os.path.dirname(cwd), ignore_errors=True)  # a killed agent has not done it


def _attend(
    control: socket.socket,
    wakeup: int,
    children: dict[int, int],
    become: Callable[[dict[str, Any], list[int]], None],
) -> None:
    """Forks and kills as the agent requests, until it closes the socket."""
    sources = [control.fileno(), wakeup]
    notices = _Notices(control)
    while True:
        ready, _, _ = select.select(sources, sources[:1] if notices.waiting else [], [])
        notices.flush()
        if wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)
            _reap(children, notices)
        if sources[0] in ready:
            request, fds = _receive(control)
            if request is None:
                return
            if "kill" in request:
                victims = [pid for pid, rank in children.items() if rank == request["kill"]]
                if request["alone"]:
                    send(victims, request["signal"])
                elif request["signal"] == signal.SIGKILL:
                    kill(victims)
                else:
                    send_groups(victims, request["signal"])
                continue
            try:
                pid = os.fork()
            except OSError as error:  # a process or memory limit: only this worker fails
                notices.add("failed", request["id"], str(error))
            else:
                if not pid:
                    _end_after(become, request, fds)
                children[pid] = request["id"]
                notices.add("started", request["id"], pid)
            for fd in fds:
                os.close(fd)


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The agent's next request and its descriptors; None at end of file."""
    data = b""
    while True:
        packet, fds, _, _ = socket.recv_fds(control, len(_LAST) + _PIECE, 8)
        if not packet:
            return None, []
        data += packet[1:]
        if packet[:1] == _LAST:
            return json.loads(data), fds


class _Notices:
    """Sends notices to the agent, and never waits for it: it may be waiting until the zygote has read its requests."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self.waiting: list[bytes] = []
        """Those that could not be sent yet."""

    def add(self, *notice: object) -> None:
        self.waiting.append(json.dumps(notice).encode())
        self.flush()

    def flush(self) -> None:
        while self.waiting:
            try:
                self._control.send(self.waiting[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:  # the agent has terminated: end of file follows
                pass
            del self.waiting[0]


def _reap(children: dict[int, int], notices: _Notices) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in children:
            strays = [stray for stray in offspring() if stray not in children and _belongs(stray, children[pid])]
            kill(strays, group=pid)  # what the worker has started and left running
            notices.add("ended", children.pop(pid), os.waitstatus_to_exitcode(status))


def _belongs(pid: int, rank: int) -> bool:
    """Whether that worker started the process (seen by its environment) or forked it (seen by its mark)."""
    return has_variable(pid, f"SKYFAB_RANK={rank}", f"{_MARK}={rank:0{_DIGITS}}")


def _mark(rank: int) -> None:
    """Writes the worker's number into this process's initial environment, which /proc/PID/environ shows.

    A process that is forked without exec shows the initial environment, and not variables that were set later.
    """
    import ctypes

    if len(os.environ.get(_MARK, "")) == _DIGITS:  # the bootstrap has reserved the space
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        ctypes.memmove(getenv(_MARK.encode()), f"{rank:0{_DIGITS}}".encode(), _DIGITS)
        del os.environ[_MARK]  # programs that are started with exec have SKYFAB_RANK


def _become_worker(request: dict[str, Any], fds: list[int], cwd: str, inherited: set[int], parent: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in inherited:
        os.close(fd)
    os.setsid()
    prctl(1, signal.SIGKILL)  # Linux kills it when the zygote terminates; elsewhere it exits when its pipe is closed
    if os.getppid() != parent:  # it terminated before the prctl
        os._exit(1)
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
    has_gpus = "RANK" in request["env"] or request["worker"].startswith("solo.gpu")
    if has_gpus and request["info"].get("accelerators"):
        from skyfab.host.gpu_locks import note_rank

        note_rank(request)
    from skyfab.host import compiled, hub
    from skyfab.host.agent import worker

    cache = os.path.dirname(request["stores"][-1])
    compiled.use(cache)  # the variables of the request replace it
    os.environ.update(hub.variables(cache, {**os.environ, **request["env"]}))
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA numbers the GPUs as nvidia-smi does
    worker.main(source, sink, request)
