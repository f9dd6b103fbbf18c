"""Runs a shell command and passes on what it writes; takes variables to a shell that a user enters."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import time

from skyfab.host import hub
from skyfab.host.agent.processes import kill
from skyfab.host.agent.workdir import enter, place
from skyfab.host.ask.serve import AT_END

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Final

_PIECE: Final = 65536
_GRACE: Final = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_TICK: Final = 0.05
_OLD: Final = 300.0
"""Seconds after which the file of a login that failed is deleted."""


def command(cache: str, *, line: str, workdir: str, variables: dict[str, str]) -> Iterator[Any]:
    """Yields the name of a stream with each piece of output, and then the exit code.

    `workdir` is as in host/agent/workdir.py. The command ends with the client; what it leaves in the background stays.
    """
    folder = place(workdir, cache)
    with contextlib.ExitStack() as stack:
        temporary = "" if folder else stack.enter_context(tempfile.TemporaryDirectory(prefix="skyfab-"))
        enter(folder or temporary, cache, "")
        process = subprocess.Popen(
            ["/bin/sh", "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **hub.variables(cache, {**os.environ, **variables}), **variables},
            umask=int(os.environ.get("SKYFAB_UMASK", "022"), 8),
            start_new_session=True,
        )
        AT_END.append(lambda: _end(process, temporary))
        yield from _output(process)
        os.chdir("/")
    yield process.returncode


def _output(process: subprocess.Popen[bytes]) -> Iterator[tuple[str, bytes]]:
    """What the command writes until it has ended. Its background processes may keep the pipes open."""
    with selectors.DefaultSelector() as selector:
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map():
            has_ended = process.poll() is not None  # before the read, which finds all that it has written
            ready = selector.select(_TICK)
            for key, _ in ready:
                piece = os.read(key.fd, _PIECE)
                if piece:
                    yield key.data, piece
                else:
                    selector.unregister(key.fileobj)
            if has_ended and not ready:
                break
    process.wait()


def _end(process: subprocess.Popen[bytes], temporary: str) -> None:
    if process.poll() is None:
        until = time.monotonic() + _GRACE
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(OSError):  # nothing of its group is left; not only the shell may ignore SIGTERM
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(_TICK)
            kill([process.pid], group=process.pid)
    if temporary:
        shutil.rmtree(temporary, ignore_errors=True)


def variables(cache: str, *, values: dict[str, str]) -> str:
    """Writes environment variables to a file that a shell reads and deletes: they are in no command line.

    Returns the name of the file in the cache.
    """
    for name in os.listdir(cache):
        path = os.path.join(cache, name)
        with contextlib.suppress(FileNotFoundError):  # another login has deleted it
            if name.startswith("ssh-") and time.time() - os.stat(path).st_mtime > _OLD:
                os.unlink(path)
    name = f"ssh-{secrets.token_hex(8)}"
    lines = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in values.items())
    with open(os.path.join(cache, name), "xb") as file:  # for this user alone, by the umask
        file.write(lines.encode(errors="surrogateescape"))
    return name
