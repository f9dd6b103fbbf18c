"""Deletes from the cache folder what was not used for a while.

Recognizes by their names what it may delete, and touches nothing else; links are deleted and never followed. Old
entries are first moved aside, atomically, and moved back if they were used at that moment: a pool that is just starting
finds an entry complete, or creates it again.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import time

from skyfab.host.ask.runs import agent_of, read

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final

    Test = Callable[[str], bool]

_HOUR: Final = 3600.0
_DAY: Final = 24 * _HOUR
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_DIGEST: Final = re.compile(r"[0-9a-f]{16,}")
_POOL: Final = re.compile(r"[0-9a-f]{16}[A-Za-z0-9_.-]*")
_DRAFT: Final = re.compile(r"\.in-.*|\.[0-9a-f]{16}-.*|[0-9a-f]{16}.*\.[0-9a-f]{16}.*")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def gc(cache: str, *, days: int, dry_run: bool) -> dict[str, Any]:
    """What was deleted: `removed`, for each kind how many and their bytes; `folders`, working folders with their bytes.

    `kept_uv`: uv's cache still has the files of deleted environments. `left`: why something could not be deleted. What
    was used in the last hour is always kept. With `dry_run` nothing is deleted.
    """
    return _Cleaning(cache, max(days * _DAY, _HOUR), dry_run=dry_run).run()


class _Cleaning:
    """One run over all folders of a cache."""

    def __init__(self, cache: str, age: float, *, dry_run: bool) -> None:
        self._cache = cache
        self._age = age
        self._dry_run = dry_run
        self._aside = f".in-gc-{secrets.token_hex(8)}"
        self._removed: dict[str, list[int]] = {}
        self._folders: list[list[Any]] = []
        self._left = ""
        self._kept_uv = False

    def run(self) -> dict[str, Any]:
        self._run_folders()
        self._environments()
        self._pythons()
        self._take("packages", "packages", self._old("packages", _DIGEST), self._touched)
        self._bundles()
        self._content()
        self._runs()
        self._working_folders()
        self._logs()
        self._drafts()
        return {
            "removed": self._removed,
            "folders": self._folders,
            "kept_uv": self._kept_uv,
            "left": self._left,
        }

    # ---- each kind

    def _run_folders(self) -> None:
        """Those of agents that are gone."""
        own = f"run/{socket.gethostname()}"
        names = self._names(own, lambda name: bool(_POOL.fullmatch(name)) and self._is_old(f"{own}/{name}", _DAY))
        commands = _command_lines()
        gone = [name for name in names if commands is not None and self._is_gone(f"{own}/{name}", commands)]
        self._take("run", own, gone, lambda name: False)

    def _is_gone(self, folder: str, commands: str) -> bool:
        path = self._path(folder)
        if os.path.basename(path) in commands:
            return False
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            before = os.open(".", os.O_RDONLY)
            try:
                if os.lstat(path).st_uid != os.getuid():
                    return False
                os.chdir(path)  # the length of socket paths is limited
                return client.connect_ex("agent.sock") in (errno.ECONNREFUSED, errno.ENOENT)
            except OSError:
                return False
            finally:
                os.fchdir(before)
                os.close(before)

    def _environments(self) -> None:
        in_use = self._in_use()
        for name in self._names("envs", lambda name: name in in_use.envs and not self._dry_run):
            used = self._path(f"envs/{name}/.used")
            if not os.path.islink(os.path.dirname(used)) and not os.path.islink(used) and os.path.exists(used):
                os.utime(used)
        old = [
            name
            for name in self._names("envs", _DIGEST)
            if not in_use.has(name, in_use.envs) and self._is_old(self._last_use(name), self._age)
        ]
        before = self._shared_size()
        count = self._take("envs", "envs", old, self._environment_is_used)
        pruned = self._prune(count)
        if not self._dry_run and (count or pruned):
            # environments are hard links to what is in uv's cache: what both have now and had before counts
            self._removed["envs"] = [count, max(0, before - self._shared_size())]

    def _last_use(self, name: str) -> str:
        """A link counts by itself."""
        used = f"envs/{name}/.used"
        return (
            used if not os.path.islink(self._path(f"envs/{name}")) and os.path.exists(self._path(used)) else used[:-6]
        )

    def _environment_is_used(self, name: str) -> bool:
        """Asked when it has been moved aside."""
        in_use = self._in_use()
        used = os.path.join(f"envs/{self._aside}", name, ".used")
        path = used if os.path.exists(self._path(used)) else os.path.dirname(used)
        return in_use.has(name, in_use.envs) or not self._is_old(path, _HOUR)

    def _prune(self, removed: int) -> bool:
        """Cleans uv's own cache after environments were deleted. Returns whether that was done."""
        if self._dry_run or not self._is_folder("uv"):
            return False
        making = re.compile(r"\.(in|lock)-.*")
        if self._names("envs", lambda name: bool(making.fullmatch(name)) and not self._is_old(f"envs/{name}", _HOUR)):
            self._kept_uv = removed > 0
            return False
        if not self._names("envs", lambda name: not name.startswith(".")):
            if any(not self._is_old(path, _HOUR) for path in self._below("uv")):
                return False
            self._take("", "", ["uv"], lambda name: False)
            return True
        if removed:
            self._kept_uv = os.environ.get("UV_LINK_MODE") == "symlink" or not _prune(self._cache)
        return removed > 0

    def _shared_size(self) -> int:
        seen: set[tuple[int, int]] = set()
        return sum(_size(self._path(folder), seen) for folder in ("envs", "uv"))

    def _pythons(self) -> None:
        """Interpreters that no environment is made from, those included that are being made."""

        def is_needed(name: str) -> bool:
            patterns = ("envs/*/pyvenv.cfg", "envs/.in-*/pyvenv.cfg", "envs/.in-*/*/pyvenv.cfg")
            return any(f"/pythons/{name}/" in read(path) for pattern in patterns for path in self._glob(pattern))

        names = [*self._old("pythons", _DIGEST), *self._old("pythons", re.compile("uv"))]
        old = [name for name in names if not is_needed(name)]
        self._take("pythons", "pythons", old, lambda name: is_needed(name) or self._touched(name))

    def _bundles(self) -> None:
        in_use = self._in_use()
        old = [name for name in self._old("bundles", _DIGEST) if not in_use.has(name, in_use.bundles)]

        def is_used(name: str) -> bool:
            now = self._in_use()
            return now.has(name, now.bundles) or self._touched(name)

        self._take("bundles", "bundles", old, is_used)

    def _content(self) -> None:
        """Trees and blobs. What a living pool uses is younger than the pool."""
        in_use = self._in_use()
        for kind in ("trees", "blobs"):
            old = [] if in_use.is_unknown else self._old(kind, _DIGEST)
            old = [name for name in old if in_use.is_older(self._path(f"{kind}/{name}"))]
            self._take(kind, kind, old, self._touched)

    def _runs(self) -> None:
        def is_over(name: str) -> bool:
            run = f"runs/{name}"
            if agent_of(self._path(run)) is not None:
                return False
            if os.path.exists(self._path(f"{run}/fetched")):
                return self._is_old(f"{run}/fetched", _DAY)
            return self._is_old(f"{run}/status", self._age)

        self._take("runs", "runs", [name for name in self._names("runs", _DIGEST) if is_over(name)], lambda name: False)

    def _working_folders(self) -> None:
        """Those in which nothing was used, and which no living pool has noted."""

        def is_noted(name: str) -> bool:
            return any(name in read(path).split("\n") for path in self._glob("run/*/*/files"))

        def is_old(name: str) -> bool:
            folder = f"files/{name}"
            if name.startswith(".") or os.path.islink(self._path(folder)) or not os.path.isdir(self._path(folder)):
                return False
            return not is_noted(name) and all(self._is_old(path, self._age) for path in self._below(folder))

        old = self._names("files", is_old)
        sizes = {name: _size(self._path(f"files/{name}"), set()) for name in old}
        self._take("files", "files", old, lambda name: is_noted(name) or self._touched(name))
        gone = [name for name in old if self._dry_run or not os.path.lexists(self._path(f"files/{name}"))]
        self._folders = [[name, sizes[name]] for name in gone]

    def _logs(self) -> None:
        def is_old(name: str) -> bool:
            if not _POOL.fullmatch(name) or self._glob(f"run/*/{name}"):
                return False
            return all(self._is_old(path, self._age) for path in self._below(f"logs/{name}"))

        self._take("logs", "logs", self._names("logs", is_old), lambda name: False)

    def _drafts(self) -> None:
        """What was left half-made, after a day."""
        folders = ("envs", "packages", "pythons", "bundles", "trees", "blobs", "files", "logs")
        for folder in (*folders, f"run/{socket.gethostname()}"):
            self._take("drafts", folder, self._old(folder, _DRAFT, _DAY), self._touched)
        self._take("drafts", "", self._old("", re.compile(r"\.in-gc-.*"), _DAY), self._touched)
        for name in self._old("envs", re.compile(r"\.lock-.*"), _HOUR) if not self._dry_run else ():
            lock, env = self._path(f"envs/{name}"), name.removeprefix(".lock-")
            making = self._glob(f"envs/.in-{env}-*")
            is_empty = os.path.isfile(lock) and not os.path.getsize(lock)
            if is_empty and not making and not os.path.lexists(self._path(f"envs/{env}")):
                os.unlink(lock)

    # ---- moving aside and deleting

    def _take(self, kind: str, folder: str, names: list[str], is_used: Test) -> int:
        """Deletes entries of a folder, except those that `is_used` names once they are aside. Returns how many."""
        if self._dry_run:
            if names:
                self._count(kind, len(names), sum(_size(self._path(f"{folder}/{name}"), set()) for name in names))
            return 0
        names, count = self._make_room(folder, list(names))
        if names:
            aside = f"{folder}/{self._aside}"
            for name in names:
                self._move(f"{folder}/{name}", f"{aside}/{name}")
            for name in os.listdir(self._path(aside)):
                if is_used(name) and not os.path.lexists(self._path(f"{folder}/{name}")):
                    os.rename(self._path(f"{aside}/{name}"), self._path(f"{folder}/{name}"))
            found, size = len(os.listdir(self._path(aside))), _size(self._path(aside), set())
            if self._delete(aside):
                count += found
                self._count(kind, count, size)
        elif count:
            self._count(kind, count, 0)
        return count

    def _make_room(self, folder: str, names: list[str]) -> tuple[list[str], int]:
        """Makes the folder for what is moved aside. A full disk has no room for it: the first to go make it."""
        count = 0
        while names:
            try:
                os.mkdir(self._path(f"{folder}/{self._aside}"))
                break
            except OSError as error:
                if error.errno not in _FULL:
                    self._fail(error)
                    return [], count
                count += self._delete(f"{folder}/{names.pop(0)}")
        return names, count

    def _move(self, source: str, target: str) -> None:
        path = self._path(source)
        try:
            if not os.path.islink(path) and os.path.isdir(path) and not os.access(path, os.W_OK):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)  # a folder that cannot be written to cannot be moved
            os.rename(path, self._path(target))
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            self._fail(error)

    def _delete(self, inner: str) -> bool:
        path = self._path(inner)
        try:
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                return True
            for folder, _, _ in os.walk(path):
                if not os.access(folder, os.W_OK | os.X_OK):
                    os.chmod(folder, 0o700)
            shutil.rmtree(path)
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        self._left = self._left or f"{error.filename or ''}: {error.strerror or error}"[-400:]

    def _count(self, kind: str, count: int, size: int) -> None:
        if kind and count:
            known = self._removed.setdefault(kind, [0, 0])
            known[0] += count
            known[1] += size

    # ---- looking

    def _path(self, inner: str) -> str:
        """The path of an entry of the cache; `inner` may begin with a slash, for those of the cache itself."""
        return os.path.join(self._cache, inner.lstrip("/"))

    def _is_folder(self, folder: str) -> bool:
        """Whether it is there, and neither it nor what is above it in the cache is a link."""
        parts = folder.split("/") if folder else []
        above = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        return os.path.isdir(self._path(folder)) and not any(os.path.islink(self._path(one)) for one in above)

    def _names(self, folder: str, test: re.Pattern[str] | Test) -> list[str]:
        if not self._is_folder(folder):
            return []
        names = [name for name in sorted(os.listdir(self._path(folder))) if _NAME.fullmatch(name)]
        return [name for name in names if (test(name) if callable(test) else test.fullmatch(name))]

    def _old(self, folder: str, pattern: re.Pattern[str], age: float | None = None) -> list[str]:
        limit = self._age if age is None else age
        return [name for name in self._names(folder, pattern) if self._is_old(f"{folder}/{name}", limit)]

    def _is_old(self, inner: str, age: float) -> bool:
        try:
            return time.time() - os.lstat(self._path(inner)).st_mtime > age
        except OSError:
            return False

    def _touched(self, name: str) -> bool:
        """Whether what was moved aside was used meanwhile."""
        for folder in ("packages", "bundles", "trees", "blobs", "pythons", "files", "envs", "logs", "run", ""):
            inner = f"{folder}/{self._aside}/{name}"
            if os.path.lexists(self._path(inner)):
                return not self._is_old(inner, _HOUR)
        return False

    def _below(self, folder: str) -> Iterator[str]:
        """The folder and everything in it."""
        yield folder
        for above, folders, files in os.walk(self._path(folder)):
            inner = os.path.relpath(above, self._cache)
            yield from (f"{inner}/{name}" for name in (*folders, *files))

    def _in_use(self) -> _InUse:
        return _InUse(self._glob("run/*/*/"))

    def _glob(self, pattern: str) -> list[str]:
        return glob.glob(os.path.join(glob.escape(self._cache), pattern))


class _InUse:
    """What living pools use, as they have noted it in their run folders (host/agent/link.py)."""

    def __init__(self, pools: list[str]) -> None:
        self.envs: set[str] = set()
        self.bundles: set[str] = set()
        self.is_unknown = False
        """A pool has not noted yet what it uses: that may be anything."""
        self._oldest = float("inf")
        for pool in pools:
            note = os.path.join(pool, "bundle")
            bundle = read(note).strip()
            if bundle or (os.path.exists(note) and os.path.getsize(note)):
                self.bundles.add(bundle)
            else:
                note, self.is_unknown = pool, True
            self.envs.add(read(os.path.join(pool, "env")).strip())
            with contextlib.suppress(OSError):  # the pool has ended just now
                self._oldest = min(self._oldest, os.stat(note).st_mtime)

    def has(self, name: str, names: set[str]) -> bool:
        return self.is_unknown or name in names

    def is_older(self, path: str) -> bool:
        """Older than all living pools; links count as such."""
        try:
            found = os.lstat(path)
        except OSError:  # another process was faster
            return False
        return stat.S_ISLNK(found.st_mode) or found.st_mtime < self._oldest


def _size(path: str, seen: set[tuple[int, int]]) -> int:
    """Bytes on the disk; hard links to the same file count once."""
    try:
        found = os.lstat(path)
        inner = os.listdir(path) if stat.S_ISDIR(found.st_mode) else []
    except OSError:
        return 0
    total = sum(_size(os.path.join(path, name), seen) for name in inner)
    if (found.st_dev, found.st_ino) not in seen:
        seen.add((found.st_dev, found.st_ino))
        total += found.st_blocks * 512
    return total


def _command_lines() -> str | None:
    """The command lines of all processes; None if this process is not among them, and others may be hidden too."""
    found = {path.split("/")[2]: read(path).replace("\0", " ") for path in glob.glob("/proc/[0-9]*/cmdline")}
    if not found:
        done = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, stdin=subprocess.DEVNULL)
        lines = done.stdout.decode(errors="replace").splitlines()
        found = dict(line.strip().partition(" ")[::2] for line in lines)
    return "\n".join(found.values()) if str(os.getpid()) in found else None


def _prune(cache: str) -> bool:
    """Has uv clean its cache; False if there is no uv."""
    home = os.path.expanduser("~")
    for uv in (
        *glob.glob(f"{glob.escape(cache)}/packages/*/uv"),
        "uv",
        f"{home}/.local/bin/uv",
        f"{home}/.cargo/bin/uv",
    ):
        program = shutil.which(uv)
        if program is None:
            continue
        environ = {**os.environ, "UV_CACHE_DIR": f"{cache}/uv", "UV_NO_CONFIG": "1"}
        words = [program, "cache", "prune", "-q", "--ci"]
        done = subprocess.run(words, env=environ, capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return True
    return False
