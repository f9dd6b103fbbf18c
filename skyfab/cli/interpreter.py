"""Continues `skyfab run` with the project's own Python, if the command was installed outside the project."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from skyfab.calls.modules import folders_above
from skyfab.errors import UsageError

_LOG: Final = logging.getLogger("skyfab")
_PROBE: Final = "import importlib.util as u, sys; print(*sys.version_info[:2], int(u.find_spec('skyfab') is not None))"
_PROGRAM: Final = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from skyfab.cli import main; main()"
"""As the installed command: modules of the current folder do not take the place of others."""
_TIMEOUT: Final = 30
_HANDED_OVER: Final = "SKYFAB_HANDED_OVER"
"""The environment variable that says that a command has continued with the Python of its project."""


def hand_over(script: Path) -> None:
    """Replaces this process by the same command in the environment of the script's project, if that has skyfab.

    An environment that is activated is used as it is. Raises UsageError if the project's Python has another minor
    version, and no skyfab: what runs on hosts must have the version of this program.
    """
    environment = _environment(script)
    if os.environ.pop(_HANDED_OVER, None):  # the project's Python may start that of another environment
        return
    if environment is None or _is(environment, sys.prefix) or _is(Path(os.environ.get("VIRTUAL_ENV", "")), sys.prefix):
        return
    if Path(sys.argv[0]).name not in ("skyfab", "__main__.py"):  # another program, such as invoke
        return
    python = environment / "bin" / "python"
    try:
        asked = subprocess.run([python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_TIMEOUT)
        major, minor, has_skyfab = map(int, asked.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        _LOG.debug("%s does not start: not used", python)
        return
    if has_skyfab:
        _LOG.debug("running with the project's Python: %s", python)
        sys.stderr.flush()
        os.environ[_HANDED_OVER] = "1"
        os.execv(python, [str(python), "-c", _PROGRAM, *sys.argv[1:]])
    if (major, minor) != sys.version_info[:2]:
        ours = ".".join(map(str, sys.version_info[:2]))
        raise UsageError(
            f"the project has Python {major}.{minor} ({python}) without skyfab, but this command runs Python {ours}",
            hint="uv add skyfab",
        )


def _environment(script: Path) -> Path | None:
    """The `.venv` in the script's folder, or in that of the nearest pyproject.toml."""
    for folder in folders_above(script):
        is_project = (folder / "pyproject.toml").is_file()
        if (is_project or folder == script.parent) and (folder / ".venv" / "bin" / "python").exists():
            return folder / ".venv"
        if is_project:
            return None
    return None


def _is(path: Path, prefix: str) -> bool:
    return path.resolve() == Path(prefix).resolve()
