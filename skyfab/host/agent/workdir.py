"""The working folder of a host's workers: creates it, copies included files into it, reports new files.

A project's folder in the cache, or a path that the user has given, persists when the pool closes. The files that the
user included are copied into it, and other files that were written there can be listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import stat
import sys
import time

from skyfab.errors import HostUnfit, ProtocolError

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Final

INCLUDED: Final = "files"
"""The folder of a project's tree with the files that are copied into the working folder."""
_MOST: Final = 20_000
_SECONDS: Final = 0.5
"""Limits for the scan of a working folder, files and seconds: it may contain any number of files."""
_NAMES: Final = 200
_FICLONE: Final = 0x40049409
"""Of Linux: the blocks of a file become those of another one."""


def unusable(folder: str, error: OSError) -> HostUnfit:
    """The error for a working folder that cannot be created or entered."""
    name = f"the working folder {folder}" if folder else "the working folder"
    return HostUnfit(
        f"cannot use {name}: {error}",
        hint='choose another one (Compute(workdir="/path"), workdir = … in the inventory), or workdir="temp"',
    )


def place(workdir: str, cache: str) -> str:
    """The path of a working folder: given by the user, or a project's folder in the cache. Empty: the pool's own.

    Raises FileNotFoundError for an unknown user, ProtocolError for an invalid name.
    """
    if not workdir:
        return ""
    if workdir.startswith(("/", "~")):
        found = os.path.expanduser(workdir)
        if not found.startswith("/"):
            raise FileNotFoundError(f"the working folder {workdir}: no such user")
        return found
    if not workdir.replace("-", "").replace("_", "").replace(".", "").isalnum() or workdir.startswith("."):
        raise ProtocolError(f"not the name of a working folder: {workdir!r:.80}")
    return os.path.join(cache, "files", workdir)


def own_name(workdir: str, owner: str) -> str:
    """The name of a run's own copy of a project's folder, which it has while another run uses that one."""
    return f"{workdir}.{owner.rpartition('.')[2][:8]}"


def enter(folder: str, cache: str, included: str, origin: str = "") -> None:
    """Creates the folder, changes to it, and copies the included files into it. Raises OSError.

    If it has an `origin`, it begins as a copy of that one.
    """
    if folder:
        kept = os.path.join(cache, "files")
        if origin:
            _copy(origin, folder)
        if os.path.dirname(folder) == kept:
            for part in (kept, folder):
                os.makedirs(part, mode=0o700, exist_ok=True)
            os.utime(folder)  # marks it as in use, for `skyfab gc`
        else:
            os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    for inner in _inside(included) if included else ():
        _lay_out(os.path.join(included, inner), inner)


def _copy(origin: str, folder: str) -> None:
    """Copies a folder, once: other processes wait until that is done.

    Programs write files in place, so none is shared by a hard link, except those that this user may not write to. On
    file systems that can, a copy shares its blocks with the original until one of them is written.
    """
    import shutil

    draft = _draft(folder)
    if not os.path.isdir(folder):
        with open(f"{draft}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.isdir(folder):
                print("another run uses the folder of this project: this one works in a copy", file=sys.stderr)
                shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
                try:
                    _fill(draft, origin)
                    with open(_mark(folder), "w"):
                        pass
                    os.rename(draft, folder)
                except BaseException:  # the other run needs the rest of the disk
                    shutil.rmtree(draft, ignore_errors=True)
                    raise
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(lock.name)


def _fill(draft: str, origin: str) -> None:
    os.mkdir(draft, mode=0o700)
    for path, folders, names in os.walk(origin):
        inner = os.path.join(draft, os.path.relpath(path, origin))
        os.makedirs(inner, exist_ok=True)
        for name in (*names, *folders):
            try:
                _copy_file(os.path.join(path, name), os.path.join(inner, name))
            except FileNotFoundError:  # the other run has just removed it
                pass
            except PermissionError as error:
                print(f"not copied: {error.filename}: {error.strerror}", file=sys.stderr)


def _discard(draft: str) -> None:
    """Removes a copy that is not complete, if no process works on it."""
    import shutil

    with contextlib.suppress(OSError), open(f"{draft}.lock", "r+") as lock:  # it has none: nothing is left
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(draft, ignore_errors=True)
        os.unlink(lock.name)


def _draft(folder: str) -> str:
    """The copy of a working folder while it is made."""
    return os.path.join(os.path.dirname(folder), f".in-{os.path.basename(folder)}")


def _mark(folder: str) -> str:
    """The file beside a copy that is as old as the copy."""
    return os.path.join(os.path.dirname(folder), f".copied-{os.path.basename(folder)}")


def copied_at(folder: str) -> float:
    """When a working folder was made as a copy; 0 if it was not."""
    try:
        return os.stat(_mark(folder)).st_mtime
    except OSError:
        return 0.0


def is_written(about: os.stat_result, since: float) -> bool:
    """Whether a file was written since then, and not copied at the last moment."""
    return about.st_ctime > since or (about.st_ctime == since and about.st_mtime >= since)


def _copy_file(source: str, target: str) -> None:
    import shutil

    about = os.lstat(source)
    if stat.S_ISLNK(about.st_mode):
        os.symlink(os.readlink(source), target)
    if not stat.S_ISREG(about.st_mode):
        return
    if not about.st_mode & 0o222 and os.geteuid():  # root may write to any file
        with contextlib.suppress(OSError):  # it belongs to another user, or is on another disk
            os.link(source, target)
            return
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            room = os.fstatvfs(new.fileno())
            if about.st_size > room.f_bavail * room.f_frsize:  # the other run needs the rest of the disk
                raise OSError(28, "not enough space for a copy", source) from None
            shutil.copyfileobj(old, new, 1 << 20)
    shutil.copystat(source, target)


def _lay_out(source: str, target: str) -> None:
    """Copies a file, unless it is already there. Several processes may do so at once."""
    import shutil  # imported late: few pools include files

    from skyfab.files.draft import own_part

    if _same(source, target) and os.access(target, os.X_OK) >= os.access(source, os.X_OK):
        return
    folder = os.path.dirname(target)
    if folder:
        os.makedirs(folder, exist_ok=True)
    draft = os.path.join(folder, os.fsdecode(own_part()))
    try:
        shutil.copy2(source, draft)
        os.replace(draft, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _same(source: str, target: str) -> bool:
    """Whether the target is a copy of the source: by size and modification time, or else by content."""
    import filecmp

    with contextlib.suppress(OSError):
        return filecmp.cmp(source, target)
    return False


def _inside(folder: str) -> Iterator[str]:
    """The paths of all files below a folder, relative to it."""
    for path, _, names in os.walk(folder):
        for name in names:
            yield os.path.relpath(os.path.join(path, name), folder)


class Written:
    """Tracks which files processes write in persistent working folders while a pool is open."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[str, float, set[str]]] = {}
        """For each working folder, by the client's name: its path, since when, and the folders of included files."""
        self._noted: set[tuple[str, str]] = set()
        self._note = -1
        self._claimed: dict[str, tuple[str, str]] = {}
        self._drafts: list[str] = []

    def claim(self, workdir: str, owner: str, cache: str) -> tuple[str, str]:
        """The name of the folder that a pool or run works in: the project's, or its own while another one uses that.

        Also the name of the one that its own begins as a copy of. For a run, that of the pool that has launched it
        takes the place of the project's: what was sent for the run is there.
        Those are related of which one has launched the other. Without an owner, a process only looks at or adds files.
        A path that the user has named is always that folder.
        """
        if not owner or not workdir or workdir.startswith(("/", "~")) or workdir in self._claimed:
            return self._claimed.get(workdir, (workdir, workdir))
        own, folder = own_name(workdir, owner), os.path.join(cache, "files")
        launcher = own_name(workdir, owner.rpartition(".")[0])
        origin = launcher if os.path.isdir(os.path.join(folder, launcher)) else workdir
        name = origin
        with contextlib.suppress(OSError):  # a file system without locks
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with open(os.path.join(folder, ".lock"), "w") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                if os.path.isdir(os.path.join(folder, own)) or _is_used(origin, owner, cache):
                    name = own
                    self._drafts.append(_draft(os.path.join(folder, own)))
                self._hold(name, owner)
                self._hold(origin)  # gc leaves it while it is copied
        self._claimed[workdir] = (name, origin)
        return name, origin

    def _hold(self, name: str, owner: str = "") -> None:
        """Notes in the run folder who uses a working folder. The note is locked while this agent lives."""
        if (name, owner) not in self._noted:
            self._noted.add((name, owner))
            if self._note < 0:
                self._note = os.open("files", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._note, fcntl.LOCK_EX)
            os.write(self._note, f"{name}\t{owner}\n".encode())

    def close(self) -> None:
        """Nothing works in the folders anymore. Removes copies whose processes were killed while they made them."""
        for draft in self._drafts:
            _discard(draft)
        if self._note >= 0:
            os.close(self._note)
            self._note = -1

    def begin(self, workdir: str, path: str, included: str, *, reported: bool = True) -> None:
        """A process is about to start in this working folder. If not `reported`, it is one that transfers files.

        Notes it in the current directory, which is the pool's run folder: there gc looks for what is in use.
        """
        with contextlib.suppress(OSError):
            self._hold(workdir)
        if not reported:
            return
        if workdir not in self._folders:
            self._folders[workdir] = (path, _now(), set())
        self._folders[workdir][2].add(included)

    def report(self) -> list[dict[str, Any]]:
        """For each directory with new files: how many, their total size, names of the newest, what all are in."""
        found = []
        transferred = _transferred()
        for workdir, (path, since, included) in self._folders.items():
            files, complete = _changed(path, max(since, copied_at(path)), included, transferred)
            if files:
                files.sort(key=lambda file: -file[2])
                found.append(
                    {
                        "workdir": workdir,
                        "count": len(files),
                        "size": sum(size for _, size, _ in files),
                        "names": [name for name, _, _ in files[:_NAMES]],
                        "common": os.path.commonpath([name for name, _, _ in files]),
                        "complete": complete,
                    }
                )
        return found


def _is_used(workdir: str, owner: str, cache: str) -> bool:
    """Whether a pool or run that is not related to this owner has noted the folder, and its agent still lives."""
    import glob

    for path in glob.iglob(os.path.join(glob.escape(cache), "run", "*", "*", "files")):
        with contextlib.suppress(FileNotFoundError), open(path, "r+") as note:
            for line in note:
                name, _, other = line.rstrip("\n").partition("\t")
                if name == workdir and other and not (other.startswith(owner) or owner.startswith(other)):
                    try:
                        fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return True
    return False


def _now() -> float:
    """The time by the clock of the file system, in the current folder."""
    with contextlib.suppress(OSError):
        os.utime("files")
        return os.stat("files").st_mtime
    return time.time()


def note_transferred(name: str, paths: Iterable[bytes], run: str) -> None:
    """Notes in the pool's run folder that these files were fetched or sent: written again, they are reported.

    The name of the note begins with ``transferred.``; it replaces an earlier one.
    """
    real = functools.cache(os.path.realpath)  # of folders: most files share theirs
    with contextlib.suppress(OSError), open(os.path.join(run, name), "wb") as note:
        places = (os.path.split(path) for path in paths)
        note.write(b"\0".join(os.path.join(real(folder), file) for folder, file in places))


def _transferred() -> dict[str, float]:
    """The files that were fetched or sent, and when last, by the notes in the current directory."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        notes = [(os.stat(name).st_mtime, name) for name in os.listdir() if name.startswith("transferred.")]
        for when, name in sorted(notes):
            with open(name, "rb") as note:
                paths = note.read().split(b"\0")
            found |= dict.fromkeys(map(os.fsdecode, paths), when)
    return found


def _changed(
    folder: str, since: float, included: set[str], transferred: Mapping[str, float]
) -> tuple[list[tuple[str, int, float]], bool]:
    """Files below a folder that were written since then (name, size and time), and whether the list is complete.

    Those that were not written since they were `transferred` are left out.
    """
    found: list[tuple[str, int, float]] = []
    folder = os.path.realpath(folder)
    deadline = time.monotonic() + _SECONDS
    for seen, inner in enumerate(_inside(folder)):
        if seen >= _MOST or time.monotonic() > deadline:
            return found, False
        path = os.path.join(folder, inner)
        try:
            about = os.lstat(path)
        except OSError:
            continue
        if not stat.S_ISREG(about.st_mode) or not is_written(about, since) or "__pycache__" in inner:
            continue
        if about.st_ctime <= transferred.get(path, 0.0):
            continue
        if not any(_same(os.path.join(place, inner), path) for place in included if place):
            found.append((inner, about.st_size, about.st_ctime))
    return found, True
