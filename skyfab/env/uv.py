"""Runs uv, the program that resolves and installs packages: its environment variables, credentials and platforms."""

from __future__ import annotations

import errno
import fcntl
import netrc
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from skyfab._util.cache import cache_folder, made_cache
from skyfab.env.facts import Target
from skyfab.env.pipconf import uv_environment
from skyfab.errors import UsageError
from skyfab.protocol.blobs import name_of

_GLIBC = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)
"""The minor versions of glibc for which uv has a platform, newest first."""

_NO_SOURCE = frozenset({".git", ".venv", "__pycache__", "node_modules"})
"""Folders that do not belong to a package's source."""
_RESULTS = frozenset({"build", "dist"})
"""Folders beside pyproject.toml that do not either."""

_NOISE = (
    "UV_NO_SOURCES",
    "UV_PROJECT",
    "UV_WORKING_DIR",
    "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
)
"""Variables that users set for their own projects, and that would change the meaning of our calls."""


class UvFailed(Exception):
    """uv failed; the text is its reason, without colours, progress and credentials."""

    @property
    def is_offline(self) -> bool:
        """Whether an index did not answer."""
        reasons = r"failed to lookup address|onnection (refused|reset)|unreachable|[Nn]o route|timed out"
        return re.search(reasons, str(self)) is not None

    @property
    def hint(self) -> str:
        """What to try next."""
        text = str(self)
        if re.search(r"No space left|[Dd]isk quota|quota exceeded", text):
            return "uv's cache on this machine is full: uv cache prune, or UV_CACHE_DIR=/path/with/space"
        if re.search(r"\b(401|403)\b|authentic|Unauthorized|Forbidden", text):
            return "put user and password into the index's URL, pip's configuration or ~/.netrc"
        if re.search(r"/whl/(cpu|cu|rocm|xpu)\S*/torch", text):
            return (
                "use one index for torch and its companions, such as PyPI: --index=URL=torch,torchvision,torchaudio"
                " or PipIndex, or add one to pip's configuration"
            )
        if re.search(r"Failed to fetch|error sending request|[Cc]onnect|dns|timed out|certificate", text):
            return "is the index up? pip config list shows the indexes in use"
        if "not found in" in text:
            return "is the name spelled correctly? pip config list shows the indexes in use"
        if re.search(r"no wheels? with a matching|[Ww]heels are available|no usable wheels", text):
            return "choose a version that has a wheel for that platform and Python"
        return "change the versions that you request"


# ---- running uv


def program() -> str:
    """The path of the uv that skyfab was installed with."""
    from uv import find_uv_bin

    try:
        return str(find_uv_bin())
    except FileNotFoundError as error:
        raise UsageError(f"cannot find uv: {error}", hint="pip install --force-reinstall uv") from error


@cache
def version() -> str:
    """As in ``uv==0.13.7``."""
    return run_uv("--version").split()[1]


def environment() -> dict[str, str]:
    """This process's environment, with pip's configuration translated for uv."""
    try:
        both = {**os.environ, **uv_environment(os.environ)}
    except ValueError as error:
        raise UsageError(redact(str(error)), hint="pip config debug") from error
    for name, between in (("UV_CONSTRAINT", " "), ("UV_OVERRIDE", " "), ("UV_EXCLUDE", " "), ("UV_FIND_LINKS", ",")):
        if both.get(name):  # uv is run in other folders than the current one
            both[name] = between.join(_absolute(entry) for entry in both[name].split(between) if entry)
    return {name: value for name, value in both.items() if name not in _NOISE}


def _absolute(entry: str) -> str:
    return entry if "://" in entry else os.path.abspath(entry)  # noqa: PTH100 - never raises


def run_uv(*arguments: str, env: Mapping[str, str] | None = None, cwd: str | Path | None = None) -> str:
    """Runs uv and returns its output: see `run`."""
    return run(program(), *arguments, env=env, cwd=cwd)


def run(*command: str, env: Mapping[str, str] | None = None, cwd: str | Path | None = None) -> str:
    """Runs uv or git and returns its output; `env` is added to `environment()`, empty values remove a variable.

    Raises UvFailed with its reason.
    """
    name = Path(command[0]).name
    changed = {**environment(), "UV_NO_PROGRESS": "1", "NO_COLOR": "1", **(env or {})}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in changed.items() if value},
            cwd=cwd,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise UvFailed(f"cannot start {name}: {error.strerror}") from error
    if done.returncode:
        text = reason(done.stderr or done.stdout) or f"{name} {command[1]} exited with {done.returncode}"
        raise UvFailed(redact(text, secrets(changed)))
    return done.stdout


_UNSAID = re.compile(
    r"(Using|Resolved|Downloading|Downloaded|Creating|warning|Request failed after)\b"
    r"|cause: (error sending request|client error|dns error|error resolving DNS|tcp connect error)"
)
"""Lines of uv that tell what it did, and links of a chain of causes that say less than the next one."""


def reason(said: str) -> str:
    """The relevant part of uv's error output, at most 15 lines.

    >>> reason("Using CPython 3.11\\nerror: Failed to fetch\\n  cause: refused\\n\\nhint: try again")
    'Failed to fetch\\ncause: refused'
    """
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r", "\n")
    kept: list[str] = []
    hint = False
    for line in text.splitlines():
        if line.startswith("hint:"):
            hint = not re.search(r"[Ww]heels are available|authentic|Unauthorized|Forbidden", line)
            line = line.removeprefix("hint:")
        elif line and not line.startswith(" "):
            hint = False
        bare = line.strip(" ╰─▶×│").removeprefix("error: ")
        if bare and not hint and not _UNSAID.match(bare):
            kept.append(bare)
    return "\n".join(kept[:15])


# ---- indexes and credentials


def redact(text: str, hidden: tuple[str, ...] = ()) -> str:
    """The text without user and password in URLs, and without the given secrets.

    >>> redact("Failed to fetch https://me:pass@mirror.example/simple")
    'Failed to fetch https://***@mirror.example/simple'
    """
    for secret in sorted(hidden, key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"(?<=://)[^/\s@'\"]+(?:@[^/\s@'\"]+)*@", "***@", text)


def bare(url: str) -> str:
    """The URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def origin(url: str) -> str:
    """Scheme, host and port: credentials are valid for these."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].lower()}"


def userinfo(url: str) -> tuple[str, str] | None:
    """The user and password in a URL."""
    parts = urlsplit(url)
    return (unquote(parts.username or ""), unquote(parts.password or "")) if "@" in parts.netloc else None


def configured(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Every index and find-links location that uv is configured with, as written, the default index last."""
    named = [*environ.get("UV_INDEX", "").split(), *environ.get("UV_EXTRA_INDEX_URL", "").split()]
    places = [re.sub(r"^[\w.-]+=", "", entry) for entry in named]
    places += [link for link in environ.get("UV_FIND_LINKS", "").split(",") if link]
    default = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL", "")
    return (*places, *([re.sub(r"^[\w.-]+=", "", default)] if default else []))


def default_index() -> list[str]:
    """The index that uv uses if no variable names one: that of its configuration files, or its own."""
    text = run_uv("pip", "compile", "-", "--emit-index-url", "--no-header", "--quiet", "--offline")
    return re.findall(r"^--index-url (\S+)", text, re.MULTILINE)


def logins(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """User and password by origin, from the indexes' URLs and from UV_INDEX_<NAME>_USERNAME and _PASSWORD."""
    found = {origin(url): pair for url in configured(environ) if (pair := userinfo(url))}
    entries = f"{environ.get('UV_INDEX', '')} {environ.get('UV_DEFAULT_INDEX', '')}"
    for name, url in re.findall(r"(?:^|\s)([\w.-]+)=(\S+)", entries):
        key = f"UV_INDEX_{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}"
        if f"{key}_USERNAME" in environ or f"{key}_PASSWORD" in environ:
            found[origin(url)] = (environ.get(f"{key}_USERNAME", ""), environ.get(f"{key}_PASSWORD", ""))
    return found


def netrc_login(url: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The login that ~/.netrc ($NETRC) has for a URL's host."""
    try:
        found = netrc.netrc(environ.get("NETRC") or None).authenticators(urlsplit(url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return (found[0], found[2] or "") if found else None


def secrets(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The passwords in an environment; for a token without password, the token."""
    found = {pair[1] or pair[0] for pair in logins(environ).values()}
    found |= {value for name, value in environ.items() if re.fullmatch(r"UV_INDEX_\w+_PASSWORD", name)}
    return tuple(secret for secret in found if secret)


def is_local(url: str) -> bool:
    """Whether only this machine can read it: a folder, or a file URL."""
    return urlsplit(url).scheme not in {"http", "https"}


def is_public(url: str) -> bool:
    """Whether a host may read it by itself: it is on a network, and needs no password of this machine."""
    environ = environment()
    private = userinfo(url) or origin(url) in logins(environ) or netrc_login(url, environ)
    return not (is_local(url) or private)


# ---- platforms


def platform_of(target: Target) -> str:
    """uv's name for a target: the newest platform that uv has and that is not newer than the host.

    >>> platform_of(Target(system="Linux", arch="x86_64", libc="glibc 2.36", python="3.11"))
    'x86_64-manylinux_2_36'
    """
    system, arch = target.system, target.machine
    libc, release = target.c_library
    if system == "Darwin" and arch in {"x86_64", "aarch64"}:
        return f"{arch}-apple-darwin"
    if system == "Linux" and libc == "glibc" and arch in {"x86_64", "aarch64"}:
        for minor in _GLIBC:
            if (2, minor) <= release:
                return f"{arch}-manylinux_2_{minor}"
    if system == "Linux" and libc == "musl" and arch in {"x86_64", "aarch64"} and release >= (1, 2):
        return f"{arch}-unknown-linux-musl"
    raise UsageError(
        f"no packages are available for {described(target)}",
        hint="supported: Linux with glibc 2.17 or newer or musl 1.2 or newer, or macOS, on x86_64 or aarch64",
    )


def described(target: Target) -> str:
    """For users: ``Linux x86_64 (glibc 2.36)``."""
    return f"{target.system or 'an unknown system'} {target.arch}{f' ({target.libc})' if target.libc else ''}".strip()


# ---- locking

_threads: dict[str, threading.Lock] = defaultdict(threading.Lock)
"""Those of a pool often need the same thing at once, also where the disk has no locks."""


@contextmanager
def making(path: Path) -> Iterator[None]:
    """Holds a lock while something in the cache is made, among all threads and processes of this user.

    The kernel releases it on exit. Raises UsageError if the cache cannot be written to.
    """
    key = sum_of(str(path))[:32]
    try:
        with _threads[key]:
            folder = made_cache() / "busy"
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / key).open("w") as file:
                with suppress(OSError):  # without locks, two processes may do the same work, and both rename its result
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            f"cannot write to the cache of this machine: {error.strerror}: {error.filename or cache_folder()}",
            hint="set another folder: XDG_CACHE_HOME=/path/with/space",
        ) from error


def made(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder of the cache. If it does not exist, `make` makes it, as ``out`` in the folder that it is given."""
    with making(folder):
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
            try:
                make(work)
                os.rename(work / "out", folder)  # noqa: PTH104 - the target does not exist
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def sum_of(text: str) -> str:
    """The sha256 of a text."""
    return name_of(text.encode(errors="surrogatepass"))


def stamp(source: Path, inner: str = "") -> str:
    """Changes when a file changes, or one below a folder; `inner` is the package's own folder in it."""
    return sum_of(repr(sorted(_files(source, inner))))


def _files(source: Path, inner: str) -> Iterator[tuple[str, int, int]]:
    for place, folders, files in os.walk(source) if source.is_dir() else [(str(source.parent), [], [source.name])]:
        skipped = _NO_SOURCE | _RESULTS if Path(place) in (source, source / inner) else _NO_SOURCE
        folders[:] = [name for name in folders if name not in skipped and not name.endswith(".egg-info")]
        for name in files:
            path = Path(place, name)
            try:
                found = path.stat()
            except OSError:
                continue  # a dangling link, or deleted meanwhile
            yield str(path), found.st_size, found.st_mtime_ns
