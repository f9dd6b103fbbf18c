"""Deletes what has not been used for a while from the cache folder.

Recognizes by their names what it may delete, and touches nothing else; links are deleted and never followed. Old
entries are first moved aside, atomically, and moved back if they were used at that moment: a pool that is just starting
finds an entry complete, or creates it again.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import time

from skyfab.host.agent.cleanup import is_dead
from skyfab.host.ask.runs import agent_of, read

TYPE_CHECKING = False  # importing `typing` would slow the start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Final

    Test = Callable[[str, float], bool]
    """Whether an entry was used by nothing for this many seconds."""

_HOUR: Final = 3600.0
_DAY: Final = 24 * _HOUR
_DIGEST: Final = r"[0-9a-f]{16,}"
_POOL: Final = r"[0-9a-f]{16}[A-Za-z0-9_.-]*"
_DRAFT: Final = r"\.in-.*|\.[0-9a-f]{16}-.*|[0-9a-f]{16}.*\.[0-9a-f]{16}.*"


def gc(cache: str, *, days: int, dry_run: bool) -> dict[str, Any]:
    """What was deleted: `removed`, for each kind how many and their bytes; `folders`, working folders with their bytes.

    `kept_uv`: uv's cache still has the files of deleted environments. `kept_models`: it is not known when models,
    fetched files and kernels were read, so they stay unless `days` is 0. `left`: why something could not be deleted.
    What was used in the last hour is always kept. With `dry_run` nothing is deleted.
    """
    return _Cleaning(cache, max(days * _DAY, _HOUR), dry_run=dry_run).run()


def gc_here(cache: str, *, days: int, dry_run: bool) -> dict[str, Any]:
    """As `gc`, of what the machine of the user stores for hosts in its own cache (env/)."""
    return _Cleaning(cache, max(days * _DAY, _HOUR), dry_run=dry_run).run_here()


class _Cleaning:
    """One run over all folders of a cache."""

    def __init__(self, cache: str, age: float, *, dry_run: bool) -> None:
        self._cache = cache
        self._age = age
        self._dry_run = dry_run
        self._in_use = _InUse(cache)
        self._seen: dict[tuple[int, int], int] = {}
        kept = {"kept_uv": False, "kept_models": False}
        self._report: dict[str, Any] = {"removed": {}, "folders": [], "left": "", **kept}

    def run(self) -> dict[str, Any]:
        own = f"run/{socket.gethostname()}"
        self._sweep("run", own, _POOL, _agent_is_gone, _DAY)
        self._environments()
        self._sweep("pythons", "pythons", f"{_DIGEST}|uv", self._no_environment_has)
        self._sweep("packages", "packages", _DIGEST)
        self._sweep("bundles", "bundles", _DIGEST, self._no_pool_has_bundle)
        for kind in ("trees", "blobs"):
            self._sweep(kind, kind, _DIGEST, self._no_pool_has)
        self._sweep("runs", "runs", _DIGEST, self._run_is_over)
        self._models()
        self._report["folders"] = self._sweep("files", "files", r"[^.].*", self._no_pool_has_folder)
        self._sweep("", "files", r"\.copied-.*", _has_no_copy)
        self._sweep("logs", "logs", _POOL, self._no_pool_writes)
        for folder in ("envs", "packages", "pythons", "bundles", "trees", "blobs", "runs", "files", "logs", own):
            self._sweep("drafts", folder, _DRAFT, age=_DAY)
        self._sweep("drafts", "", r"\.in-gc-.*", age=_DAY)
        self._sweep("drafts", "", r"ssh-[0-9a-f]{16}", age=_HOUR)  # variables of a login that failed (command.py)
        self._locks()
        return self._report

    def run_here(self) -> dict[str, Any]:
        kinds = ("wheels", "built", "locks", "tools", "hosts", "fetch", "compiled")
        for kind in kinds:
            self._sweep(kind, kind, r"[^.].*", _unread)
        self._sweep("pythons", "pythons", r"cpython-.*", _unread)
        self._sweep("blobs", "blobs", _DIGEST, self._no_pool_has)
        self._sweep("", "busy", r".*", _unread)
        for folder in (*kinds, "pythons", "blobs"):
            self._sweep("drafts", folder, r"\..*", _unread, _DAY)
        return self._report

    # ---- each kind

    def _environments(self) -> None:
        for path in self._entries("envs", _DIGEST) if not self._dry_run else ():
            if os.path.basename(path) in self._in_use.envs and not os.path.islink(path):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(f"{path}/.used", follow_symlinks=False)
        before = self._shared_size()
        count = len(self._sweep("envs", "envs", _DIGEST, self._no_pool_has_environment))
        if not self._dry_run and (self._prune(count) or count):
            # environments are hard links to what is in uv's cache: what both have now and had before counts
            self._report["removed"]["envs"] = [count, max(0, before - self._shared_size())]

    def _models(self) -> None:
        """What is as old as its last use, which only the disk notes."""
        kinds = {"hub": r"(models|datasets|spaces)--.+", "fetched": r"[^.].*", "compiled": _DIGEST}
        if self._age > _HOUR and _is_noatime(self._cache):
            self._report["kept_models"] = any(self._entries(kind, pattern) for kind, pattern in kinds.items())
            return
        for kind, pattern in kinds.items():
            self._sweep(kind, kind, pattern, _unread)

    def _no_pool_has_environment(self, path: str, age: float) -> bool:
        used = f"{path}/.used" if not os.path.islink(path) and os.path.exists(f"{path}/.used") else path
        return not self._in_use.has(path, self._in_use.envs) and _is_old(used, age)

    def _prune(self, removed: int) -> bool:
        """Cleans uv's own cache after environments were deleted. Returns whether that was done."""
        if not self._is_folder("uv"):
            return False
        if any(not _is_old(path, _HOUR) for path in self._entries("envs", r"\.(in|lock)-.*")):  # one is being made
            self._report["kept_uv"] = removed > 0
            return False
        if not self._entries("envs", r"[^.].*"):
            return bool(self._sweep("", "", "uv", _all_old, _HOUR))
        if removed:
            self._report["kept_uv"] = os.environ.get("UV_LINK_MODE") == "symlink" or not _prune(self._cache)
        return removed > 0

    def _shared_size(self) -> int:
        seen: dict[tuple[int, int], int] = {}
        return sum(_size(os.path.join(self._cache, folder), seen) for folder in ("envs", "uv"))

    def _no_environment_has(self, python: str, age: float) -> bool:
        """Whether no environment is made from an interpreter, those included that are being made."""
        patterns = ("envs/*/pyvenv.cfg", "envs/.in-*/pyvenv.cfg", "envs/.in-*/*/pyvenv.cfg")
        own = f"/pythons/{os.path.basename(python)}/"
        is_needed = any(own in read(path) for pattern in patterns for path in _glob(self._cache, pattern))
        return not is_needed and _is_old(python, age)

    def _no_pool_has_bundle(self, path: str, age: float) -> bool:
        return not self._in_use.has(path, self._in_use.bundles) and _is_old(path, age)

    def _no_pool_has(self, path: str, age: float) -> bool:
        """What a living pool uses of trees and blobs is younger than the pool."""
        return not self._in_use.is_unknown and _is_old(path, age) and _changed(path) < self._in_use.oldest

    def _no_pool_has_folder(self, path: str, age: float) -> bool:
        """Whether nothing in a working folder was used, and no living pool has noted it."""
        if os.path.islink(path) or not os.path.isdir(path):
            return False
        notes = _glob(self._cache, "run/*/*/files")
        used = {line.partition("\t")[0] for note in notes for line in read(note).split("\n")}
        return os.path.basename(path) not in used and _all_old(path, age)

    def _run_is_over(self, run: str, age: float) -> bool:
        """Whether nothing in it is new, and its agent does not live. On another host, that has a run folder then."""
        folder = read(f"{run}/agent").strip().split("/")[-2:]
        if agent_of(run)[0] is not None or (folder[1:] and os.path.isdir(os.path.join(self._cache, "run", *folder))):
            return False
        return _all_old(run, min(age, _DAY) if os.path.exists(f"{run}/fetched") else age)

    def _no_pool_writes(self, log: str, age: float) -> bool:
        return not _glob(self._cache, f"run/*/{os.path.basename(log)}") and _all_old(log, age)

    def _locks(self) -> None:
        """Deletes the lock files of environments that neither exist nor are being made."""
        for lock in self._entries("envs", r"\.lock-.*") if not self._dry_run else ():
            env = os.path.basename(lock).removeprefix(".lock-")
            making = _glob(self._cache, f"envs/.in-{env}-*") or os.path.lexists(f"{self._cache}/envs/{env}")
            if _is_old(lock, _HOUR) and not making:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    os.unlink(lock)

    # ---- moving aside and deleting

    def _sweep(
        self, kind: str, folder: str, pattern: str, is_unused: Test | None = None, age: float = 0.0
    ) -> list[tuple[str, int]]:
        """Deletes what is unused for an `age`, that of the cleaning unless it is given. Returns names and sizes."""
        is_unused = is_unused or _is_old
        self._in_use = _InUse(self._cache)
        paths = [path for path in self._entries(folder, pattern) if is_unused(path, age or self._age)]
        aside = self._make_aside(folder) if paths and not self._dry_run else ""
        if aside:
            for path in paths:
                self._move(path, aside)
            self._in_use = _InUse(self._cache)
            paths = [path for path in _paths(aside) if is_unused(path, _HOUR) or not _put_back(path)]
        sizes = [(path, _size(path, self._seen)) for path in paths]
        found = [(os.path.basename(path), size) for path, size in sizes if self._dry_run or self._delete(path)]
        with contextlib.suppress(OSError):  # something in it could not be deleted
            os.rmdir(aside)
        if kind and found:
            known = self._report["removed"].setdefault(kind, [0, 0])
            known[0] += len(found)
            known[1] += sum(size for _, size in found)
        return found

    def _make_aside(self, folder: str) -> str:
        """Makes a folder for what is moved aside. On a full disk returns an empty string: entries go where they are."""
        path = os.path.join(self._cache, folder, f".in-gc-{secrets.token_hex(8)}")
        with contextlib.suppress(OSError):
            os.mkdir(path)
            return path
        return ""

    def _move(self, path: str, folder: str) -> None:
        try:
            if not os.path.islink(path) and os.path.isdir(path) and not os.access(path, os.W_OK):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)  # a folder that cannot be written to cannot be moved
            os.rename(path, os.path.join(folder, os.path.basename(path)))
        except FileNotFoundError:
            pass  # another process was faster
        except OSError as error:
            self._fail(error)

    def _delete(self, path: str) -> bool:
        try:
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                return True
            for folder, _, _ in os.walk(path):
                if not os.access(folder, os.W_OK | os.X_OK):
                    os.chmod(folder, 0o700)
            shutil.rmtree(path)
        except FileNotFoundError:
            return False  # another process was faster
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        self._report["left"] = self._report["left"] or f"{error.filename or ''}: {error.strerror or error}"[-400:]

    # ---- looking

    def _is_folder(self, folder: str) -> bool:
        """Whether it is there, and neither it nor what is above it in the cache is a link."""
        path = os.path.normpath(os.path.join(os.path.realpath(self._cache), folder))
        return os.path.isdir(path) and os.path.realpath(path) == path

    def _entries(self, folder: str, pattern: str) -> list[str]:
        if not self._is_folder(folder):
            return []
        is_ours = re.compile(rf"(?=[A-Za-z0-9_.-]+\Z)(?:{pattern})")
        paths = _paths(os.path.join(self._cache, folder))
        return [path for path in paths if is_ours.fullmatch(os.path.basename(path))]


class _InUse:
    """What living pools use, as they have noted it in their run folders (host/agent/link.py)."""

    def __init__(self, cache: str) -> None:
        self.envs: set[str] = set()
        self.bundles: set[str] = set()
        self.is_unknown = False
        """A pool has not noted yet what it uses: that may be anything."""
        self.oldest = float("inf")
        """When the first of them started."""
        for pool in _glob(cache, "run/*/*/"):
            note = os.path.join(pool, "bundle")
            bundle = read(note)
            if bundle:
                self.bundles.add(bundle.strip())
            else:
                note, self.is_unknown = pool, True
            self.envs.add(read(os.path.join(pool, "env")).strip())
            with contextlib.suppress(OSError):  # the pool has ended just now
                self.oldest = min(self.oldest, os.stat(note).st_mtime)

    def has(self, path: str, names: set[str]) -> bool:
        return self.is_unknown or os.path.basename(path) in names


def _has_no_copy(mark: str, age: float) -> bool:
    """Whether the copy of a working folder that this file belongs to is gone (host/agent/workdir.py)."""
    return not os.path.isdir(mark.replace("/.copied-", "/"))


def _agent_is_gone(folder: str, age: float) -> bool:
    """With an `age` of a day, also if the agent is one of another machine with this name: it touches its folder."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(os.path.dirname(folder))  # the length of socket paths is limited
        return _is_old(folder, age) and is_dead(os.path.basename(folder))
    except OSError:
        return False  # a link is about to start one
    finally:
        os.fchdir(before)
        os.close(before)


def _put_back(path: str) -> bool:
    """Moves an entry back to where it was, unless another one is there by now."""
    folder, name = os.path.split(path)
    before = os.path.join(os.path.dirname(folder), name)
    if os.path.lexists(before):
        return False
    os.rename(path, before)
    return True


def _is_old(path: str, age: float) -> bool:
    return time.time() - _changed(path) > age


def _changed(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return float("inf")  # another process was faster


def _all_old(folder: str, age: float) -> bool:
    """Whether it is, and everything in it."""
    return _is_old(folder, age) and all(_is_old(path, age) for path in _below(folder))


def _unread(path: str, age: float) -> bool:
    """Whether nothing in it was written or read. Of folders and links only writes count: a scan reads them."""
    try:
        found = [os.lstat(each) for each in (path, *(() if os.path.islink(path) else _below(path)))]
    except OSError:  # another process was faster
        return False
    used = [max(one.st_mtime, one.st_atime) if stat.S_ISREG(one.st_mode) else one.st_mtime for one in found]
    return time.time() - max(used) > age


def _is_noatime(folder: str) -> bool:
    """Whether its disk does not record when files are read."""
    try:
        return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOATIME", 0))
    except OSError:  # it does not exist
        return False


def _below(folder: str) -> Iterator[str]:
    for above, folders, files in os.walk(folder):
        yield from (os.path.join(above, name) for name in (*folders, *files))


def _paths(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]


def _glob(cache: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(cache), pattern))


def _size(path: str, seen: dict[tuple[int, int], int]) -> int:
    """Bytes on the disk; a file with several hard links counts when the last of them is seen."""
    total = 0
    for each in (path, *(_below(path) if not os.path.islink(path) else ())):
        with contextlib.suppress(OSError):
            found = os.lstat(each)
            links = seen[found.st_dev, found.st_ino] = seen.get((found.st_dev, found.st_ino), 0) + 1
            if links >= found.st_nlink or stat.S_ISDIR(found.st_mode):
                total += found.st_blocks * 512
    return total


def _prune(cache: str) -> bool:
    """Has uv clean its cache; False if there is no uv."""
    home = os.path.expanduser("~")
    for uv in (*_glob(cache, "packages/*/uv"), "uv", f"{home}/.local/bin/uv", f"{home}/.cargo/bin/uv"):
        if program := shutil.which(uv):
            environ = {**os.environ, "UV_CACHE_DIR": f"{cache}/uv", "UV_NO_CONFIG": "1"}
            words = [program, "cache", "prune", "-q", "--ci"]
            done = subprocess.run(words, env=environ, capture_output=True, stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                return True
    return False
