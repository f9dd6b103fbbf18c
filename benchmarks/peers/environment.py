"""The environment of the peers: a virtual environment in `.inv/`, with the versions that `constraints.txt` pins.

A peer that cannot be installed does not stop the others: it has a reason instead of a version.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.bootstrap import CUDA, PRIVATE, SetupError, Uv, exclusive, find_uv, get_uv, say, uv_environ

CONSTRAINTS: Final = Path(__file__).with_name("constraints.txt")
_BASE: Final = "numpy"
"""What the work on hosts needs, whoever asks for it."""
_NO_TORCH: Final = "no build of torch for CPUs was found, and one for CUDA takes gigabytes"


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a package is not installed."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @classmethod
    def make(cls, packages: Mapping[str, str], *, folder: Path = PRIVATE / "peers") -> Environment:
        """Installs each package, with the requirements that it is given here, separated by spaces.

        Raises SetupError if not even numpy can be installed.
        """
        made = cls(folder)
        stamp = made._stamp(packages)
        PRIVATE.mkdir(exist_ok=True)
        with exclusive(PRIVATE / "lock"):
            if made._read_stamp() == stamp:
                return made
            uv = Uv(find_uv() or get_uv(), uv_environ(os.environ))
            if not made.python.exists():
                uv("venv", "--quiet", "--no-project", "--python", sys.executable, str(folder))
            say(f"installing what is compared with into {folder.name}")
            made._install(uv, _BASE)
            for package, requirements in packages.items():
                try:
                    made._install(uv, requirements)
                except SetupError as error:
                    made.reasons[package] = _short(str(error))
            say("compiling it, so that it is imported as fast as skyfab")
            subprocess.run([made.python, "-m", "compileall", "-q", folder / "lib"], stdout=subprocess.DEVNULL)
            if not made.reasons:
                (folder / "stamp").write_text(stamp)
        return made

    def _install(self, uv: Uv, requirements: str) -> None:
        """Raises SetupError, also if it would bring CUDA along."""
        into = ("--quiet", "--python", str(self.folder), "--only-binary", ":all:")
        for options in ((), ("--torch-backend", "cpu")):
            wanted = ("--no-header", "--no-annotate", "--constraints", str(CONSTRAINTS), *options)
            pins = uv("pip", "compile", *into, *wanted, "-", text="\n".join(requirements.split()) + "\n")
            if not CUDA.search(pins):
                uv("pip", "install", *into, "--no-deps", *options, "--requirements", "-", text=pins)
                return
        raise SetupError(_NO_TORCH)

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """The versions of those packages that are installed."""
        program = (
            "import importlib.metadata as m, json, sys; names = {d.name.lower(): d.version for d in m.distributions()};"
            "print(json.dumps({n: names[n] for n in sys.argv[1:] if n in names}))"
        )
        said = subprocess.run([self.python, "-c", program, *names], stdout=subprocess.PIPE, check=True).stdout
        found: dict[str, str] = json.loads(said)
        return found

    def _stamp(self, packages: Mapping[str, str]) -> str:
        pins = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
        return json.dumps([sys.executable, platform.machine(), pins, packages])

    def _read_stamp(self) -> str:
        try:
            return (self.folder / "stamp").read_text()
        except OSError:
            return ""


def _short(text: str) -> str:
    """The sentence of uv's that says why, in one line."""
    lines = [line.strip(" ×╰─▶│├") for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("uv pip", "hint:", "No solution"))]
    return " ".join(lines)[:200] or "uv failed"
