"""Records a terminal: types README's commands into a shell, with two hosts of the lab, and draws what the screen shows.

python -m tools.record        writes docs/pictures/terminal.svg: an animation of less than half a minute
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from pathlib import Path

import pyte

from tools.terminal_svg import Frame, Recording, Run

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "pictures" / "terminal.svg"

COLUMNS, ROWS = 76, 50
"""More rows than are used: the picture ends with the last one that is."""
KEY = 0.035
"""Seconds between two keys."""
SETTLED = 0.4
"""The prompt has to be there for so long."""
LONGEST = 60.0
"""Seconds for one command."""


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        environ = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": home,
            "TERM": "xterm-256color",
            "PS1": "$ ",
        }
        try:
            with Terminal(environ) as terminal:
                terminal.wait()
                for command in commands((ROOT / "README.md").read_text(encoding="utf-8")):
                    terminal.type(command)
                recording = terminal.recording()
        finally:  # the last command takes the lab down, unless another one failed
            subprocess.run([sys.executable, "-m", "skyfab", "lab.down"], env=environ, cwd=ROOT, capture_output=True)
    for private in (home, str(ROOT), str(Path.home())):
        if any(private in line for line in recording.text()):
            sys.exit(f"the screen shows {private}")
    recording.svg("README's commands in a terminal: a function runs here, then on two hosts").write(FILE)


def commands(page: str) -> list[str]:
    """What a page has the reader type in its consoles, but for the installation."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    typed = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [command for command in typed if "pip install" not in command]


class Terminal:
    """A shell on a pseudo-terminal, whose screen is recorded."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._started = time.monotonic()
        self._frames: list[Frame] = []
        self._part = 0
        self._shell, self._master = pty.fork()
        if self._shell == pty.CHILD:
            os.chdir(ROOT)
            os.execve("/bin/bash", ["bash", "--norc", "--noediting"], dict(environ))
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        os.kill(self._shell, signal.SIGHUP)
        os.waitpid(self._shell, 0)
        os.close(self._master)

    def type(self, command: str) -> None:
        """Types a command, key by key, and waits until it is done."""
        for key in command:
            os.write(self._master, key.encode())
            self._read(KEY)
        self._part += 1
        os.write(self._master, b"\r")
        self.wait()
        self._part += 1

    def wait(self) -> None:
        """Waits for the prompt."""
        deadline = time.monotonic() + LONGEST
        while self._read(SETTLED) or not self._at_prompt():
            if time.monotonic() > deadline:
                sys.exit("no prompt; the screen:\n" + "\n".join(self._screen.display))

    def _at_prompt(self) -> bool:
        return self._screen.display[self._screen.cursor.y].rstrip() == "$" and self._screen.cursor.x == 2

    def _read(self, seconds: float) -> bool:
        """Takes what comes within `seconds` for the screen; whether something came. Raises if the shell has ended."""
        came = False
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and select.select([self._master], [], [], left)[0]:
            self._stream.feed(os.read(self._master, 65536))
            came = True
            lines = tuple(map(self._line, range(ROWS)))
            self._frames.append(Frame(time.monotonic() - self._started, self._part, lines))
        return came

    def _line(self, row: int) -> tuple[Run, ...]:
        """A line of the screen, in runs of one colour."""
        runs: list[Run] = []
        line = self._screen.buffer[row]
        width = len(self._screen.display[row].rstrip())
        for column in range(width):
            cell = line[column]
            if runs and (runs[-1].colour, runs[-1].bold) == (cell.fg, cell.bold):
                runs[-1] = runs[-1]._replace(text=runs[-1].text + cell.data)
            else:
                runs.append(Run(column, cell.data, cell.fg, cell.bold))
        return tuple(runs)

    def recording(self) -> Recording:
        return Recording(COLUMNS, self._frames)


if __name__ == "__main__":
    main()
