"""The development environment: ./inv runs this when .venv is missing or not made from today's files.

    python -I tools/bootstrap.py STAMP
    python -I tools/bootstrap.py --python 3.12     an environment for the fast tests with that Python; prints its path

Gets uv where the machine has none, resolves everything together with a torch that fits the machine, installs it
into .venv and writes STAMP there as the last step: a set-up that was interrupted has no stamp and is done again.
Standard library only.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".inv-stamp"
PRIVATE = ROOT / ".inv"
"""uv where the machine has none, uv's cache where the home folder cannot hold it, and the lock."""

OLDEST_UV = (0, 8)
"""Older ones lack --group or --torch-backend in `uv pip`."""

CUDA = re.compile(r"^(nvidia-|cuda-|triton\b|pytorch-triton|torch==\S*\+(cu|rocm|xpu))", re.MULTILINE)
"""Pins of a build for GPUs: gigabytes. It runs without a GPU too, but a build for CPUs is preferred there."""


class SetupError(Exception):
    """The environment cannot be made; the text says why, and what to type."""


def main(stamp: str) -> None:
    with exclusive(PRIVATE / "lock"):
        if _read(STAMP) == stamp:
            return  # another ./inv made it while this one waited
        started = time.monotonic()
        build(stamp)
        say(f"ready after {time.monotonic() - started:.0f} s; for skyfab and python in this shell:")
        say(f"  source {_shown(VENV)}/bin/activate")


def build(stamp: str) -> None:
    uv = Uv(find_uv() or get_uv(), uv_environ(os.environ))
    made_here = _read(STAMP).startswith(f"{ROOT}\n")
    STAMP.unlink(missing_ok=True)
    if not (made_here and (VENV / "bin" / "python").exists()):
        say(f"making .venv with Python {'.'.join(map(str, sys.version_info[:3]))}")
        shutil.rmtree(VENV, ignore_errors=True)
        uv("venv", "--quiet", "--no-project", "--python", sys.executable, str(VENV))
    say("choosing versions")
    groups = ("--group", "dev") if stamp.endswith("\ndev") else ()
    pins, options = resolve(uv, groups)
    say("installing into .venv")
    install = ("pip", "sync", "--python", str(VENV), *options)
    uv(*install, "-", text=pins, show=True)
    say("compiling, so that ranks import torch in half the time: a minute or so")
    uv(*install, "--quiet", "--compile-bytecode", "-", text=pins)
    STAMP.write_bytes(os.fsencode(stamp))


def other(version: str) -> Path:
    """An environment with another Python, for the tests that need no torch and no framework. Returns its Python."""
    folder = PRIVATE / f"python{version}"
    with exclusive(PRIVATE / "lock"):
        uv = Uv(find_uv() or get_uv(), uv_environ(os.environ))
        python = find_python(uv, version)
        uv("venv", "--quiet", "--no-project", "--clear", "--python", python, str(folder))
        options = ("--quiet", "--no-header", "--no-annotate", "--python", str(folder))
        groups = ("--group", "testing", "--constraints", "constraints.txt")
        pins = uv("pip", "compile", *options, *groups, "-", text="-e .\n")
        say(f"installing into {folder.relative_to(ROOT)}")
        uv("pip", "sync", "--python", str(folder), "-", text=pins, show=True)
    return folder / "bin" / "python"


def find_python(uv: Uv, version: str) -> str:
    """The path of an interpreter that uv finds, or that pyenv has: its shims start only the versions it is set to."""
    try:
        return uv("python", "find", "--no-project", version).strip()
    except SetupError:
        pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
        found = sorted(pyenv.glob(f"versions/{version}*/bin/python3"))
        if found:
            return str(found[-1])
        hint = f"hint: uv python install {version}, where this machine may download one"
        raise SetupError(f"Python {version} is not on this machine\n{hint}") from None


# Versions: everything in one resolution, so that what was looked at is what is installed.


def resolve(uv: Uv, groups: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Pins for the whole environment, and the options to install them with."""
    gpu = has_gpu()
    large: tuple[str, Torch] | None = None
    reasons = []
    for choice in torch_choices(uv, gpu=gpu):
        try:
            pins = compile_pins(uv, f"-e .[torch]\n{choice.pin}\n", *groups, *choice.options)
        except SetupError as error:  # it has no build for this Python and platform, or is out of reach
            reasons.append((choice.source, str(error)))
            continue
        if gpu or not CUDA.search(pins):
            say(f"torch {_version(pins, 'torch')} {choice.source}")
            return pins, choice.options
        large = large or (pins, choice)
    if large is None:
        raise SetupError("\n".join([*(f"torch {source}: {error}" for source, error in reasons), NO_TORCH]))
    pins, choice = large
    why = "".join(f"; {source}: {error.splitlines()[0]}" for source, error in reasons)
    say(f"torch {_version(pins, 'torch')} {choice.source}, built for CUDA (about 3 GB): no CPU build was found{why}")
    return pins, choice.options


NO_TORCH = """no torch for this machine
hint: check the index (pip config list), or put a wheel of torch into a folder and set PIP_FIND_LINKS to it"""


def compile_pins(uv: Uv, requirements: str, *options: str) -> str:
    return uv("pip", "compile", *COMPILE, "--constraints", "constraints.txt", *options, "-", text=requirements)


COMPILE = ("--quiet", "--no-header", "--no-annotate", "--python", str(VENV))


@dataclass(frozen=True)
class Torch:
    """A place to take torch from."""

    source: str
    pin: str = ""
    options: tuple[str, ...] = ()


def torch_choices(uv: Uv, *, gpu: bool) -> Iterator[Torch]:
    """Where torch may come from, best first; asked for one at a time, as some cost a look at the network."""
    if gpu:
        yield Torch("for this machine's GPU", options=("--torch-backend", "auto"))
        yield Torch("from the index")
        return
    for version in configured_cpu_builds(uv):
        yield Torch("from the places in pip's configuration", pin=f"torch=={version}")
    # Before PyTorch's own index, which is often out of reach. On macOS this is a CPU build; a build for CUDA, as PyPI
    # has for Linux, is only taken if PyTorch's index has none for CPUs.
    yield Torch("from the index")
    yield Torch("from PyTorch's CPU index", options=("--torch-backend", "cpu"))


def configured_cpu_builds(uv: Uv) -> Iterator[str]:
    """Versions like 2.13.0+cpu in find-links and in the configured indexes, each asked alone.

    Asked together, a newer torch of the default index would hide them, and that one brings CUDA along.
    """
    sources: list[tuple[tuple[str, ...], dict[str, str]]] = []
    if uv.environ.get("UV_FIND_LINKS"):
        sources.append((("--no-index",), {}))
    indexes = [*uv.environ.get("UV_INDEX", "").split(), uv.environ.get("UV_DEFAULT_INDEX", "")]
    sources += [(("--default-index", url), {"UV_INDEX": "", "UV_FIND_LINKS": ""}) for url in indexes if url]
    for options, changes in sources:
        alone = Uv(uv.program, {**uv.environ, **changes})
        try:
            version = _version(alone("pip", "compile", *COMPILE, "--no-deps", *options, "-", text="torch\n"), "torch")
        except SetupError:
            continue
        if version.endswith("+cpu"):
            yield version


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here: a device node, or a driver that lists one (WSL has no nodes)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU 0" in listing.stdout


# uv: found or fetched.


@dataclass(frozen=True)
class Uv:
    """uv as a function: returns what it prints, raises SetupError with what it says."""

    program: str
    environ: Mapping[str, str]

    def __call__(self, *arguments: str, text: str = "", show: bool = False) -> str:
        return _run([self.program, *arguments], environ=self.environ, text=text, show=show)


def find_uv() -> str | None:
    """uv on PATH or from an earlier set-up, if it starts and is new enough."""
    for program in (shutil.which("uv"), str(PRIVATE / "uv" / "bin" / "uv")):
        if program and uv_version(program) >= OLDEST_UV:
            return program
    return None


def uv_version(program: str) -> tuple[int, ...]:
    """(0,) for one that does not start, such as a pyenv shim without a version behind it."""
    try:
        words = _run([program, "--version"]).split()
        return tuple(int(part) for part in words[1].split(".")[:2])
    except (SetupError, IndexError, ValueError):
        return (0,)


def get_uv() -> str:
    """Install uv for this checkout alone: the system's Python may refuse installs (PEP 668)."""
    say("installing uv for this checkout: half a minute or so")
    folder = PRIVATE / "uv"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        # `user = true` in someone's pip.conf would be refused inside a virtual environment.
        _run([*pip_install_into(folder), "uv"], environ={**os.environ, "PIP_USER": "0"})
    except SetupError as error:
        hint = "install uv yourself, or see where pip was told to look: pip config list"
        raise SetupError(f"{error}\ncannot get uv\nhint: {hint}") from error
    return str(folder / "bin" / "uv")


def pip_install_into(folder: Path) -> list[str]:
    """A command that installs into `folder`, from what this Python has of venv, ensurepip and pip."""
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        return [make_venv(folder), *install]
    except SetupError as error:
        problem = error
        shutil.rmtree(folder, ignore_errors=True)  # half a venv, which pip would not write into
    # Debian keeps venv's other half, ensurepip, in a package of its own; pip may be there all the same.
    if importlib.util.find_spec("pip"):
        return [sys.executable, *install, "--target", str(folder)]
    if os.geteuid() == 0 and sys.base_prefix == "/usr" and shutil.which("apt-get"):
        say("apt-get install python3-venv")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _run(["apt-get", "-qq", "update"])
        _run(["apt-get", "-qq", "install", "-y", "python3-venv"], environ=quiet)
        return [make_venv(folder), *install]
    raise problem


def make_venv(folder: Path) -> str:
    """A virtual environment with pip; returns its Python."""
    _run([sys.executable, "-m", "venv", str(folder)])
    return str(folder / "bin" / "python")


def uv_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment with pip's configuration in uv's words, and a cache that can be written."""
    pipconf = runpy.run_path(str(ROOT / "skyfab" / "env" / "pipconf.py"))
    try:
        result = {**environ, **pipconf["uv_environment"](environ)}
    except ValueError as error:
        raise SetupError(str(error)) from error
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):  # .venv is named in each call; these only bring warnings
        result.pop(name, None)
    if not result.get("UV_CACHE_DIR") and not _has_cache(environ):
        result["UV_CACHE_DIR"] = str(PRIVATE / "cache")
    return result


def _has_cache(environ: Mapping[str, str]) -> bool:
    """Whether uv's usual cache folder is there and can be written; tried, as permissions alone do not tell."""
    if environ.get("HOME") == "":
        return False
    cache = Path(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "uv"  # noqa: PTH111 - never raises
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(cache, os.W_OK | os.X_OK)


# Running, waiting, telling.


def _run(command: list[str], *, environ: Mapping[str, str] = os.environ, text: str = "", show: bool = False) -> str:
    """Run in the checkout; `show` leaves stderr, with its progress bars, to the terminal."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=dict(environ),
            input=text,
            encoding="utf-8",
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            # The child keeps the lock too: should this process be killed, a second ./inv still waits for uv's end.
            close_fds=False,
            check=False,
        )
    except OSError as error:
        raise SetupError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = "" if show else f"{done.stdout}{done.stderr}".strip()
        raise SetupError(f"{said}\n{Path(command[0]).name} {' '.join(command[1:3])} failed ({done.returncode})".strip())
    return done.stdout


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel drops when its holders end, however they end."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another ./inv is setting up: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            say("this file system has no locks: start one ./inv at a time until .venv is there")
        yield


def _shown(path: Path) -> str:
    """A path as it is typed in the caller's folder."""
    folder = Path.cwd()
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))


def _version(pins: str, package: str) -> str:
    found = re.search(rf"^{package}==(\S+)", pins, re.MULTILINE)
    return found[1] if found else ""


def _read(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def say(text: str) -> None:
    for line in text.splitlines():
        print(f"inv: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "--python":
            print(other(sys.argv[2]))
        else:
            main(sys.argv[1])
    except SetupError as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted: the next ./inv continues, and what was downloaded is kept")
        sys.exit(130)
