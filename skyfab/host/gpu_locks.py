"""GPU leases between the users of a host: who holds which GPUs, and who waits for some. Files and locks, no daemon.

Each process that wants GPUs publishes a *ticket*, and once it has them a *hold*. They are files in /tmp, which is
sticky: only the owner of a file can remove it. A file is created with mode 0600, locked, written, and published by
changing its mode to 0644. The lock is a write lock, for which a file must be open for writing: only its owner can have
it. On Linux it belongs to the open file (F_OFD_SETLK), elsewhere to the process; it ends when the process and programs
that were started with this file open have ended, whatever ends them. Others test it by trying a read lock, which only a
write lock refuses, and which hinders nobody. Owner and kind in the name must be those of the file; symbolic links,
other kinds of files, and content that is invalid do not count. A dead file counts no longer; the next process of its
owner removes it.

Why two processes never hold the same GPU: a process publishes its hold, then looks at all others, and withdraws if
any of them has one of its GPUs. Suppose that P and Q hold the same GPU. Both holds stay published from before the look
until the release, and one was published first, say that of P. Q looked after it had published its own, so it saw that
of P, and withdrew. The proof uses neither clocks nor the order of tickets: whatever those say, nobody holds
twice. (It also needs that a look finds each file that was there before it began, which POSIX guarantees for readdir,
and that P did not lose its lock: a process must never open and close one of its own files, which would release it
where locks belong to processes.)

Other ranks of a gang use the GPUs that the first one on their host holds, and may live longer. Each *joins* the hold
before it uses them: it publishes a file of its own, and then makes sure that the hold is alive. Until then others saw
the hold, from then on they see the file: there is no moment at which they see neither. Programs on these GPUs are
started with the open file, so that they have the lock as long as they live, on Linux; elsewhere they end shortly after
the process that has started them. Before GPUs are taken, the vendor's tool is asked who uses them, too.

Why somebody always gets GPUs: only the first ticket may publish a hold, so holds rarely meet. The order is (priority,
change time, inode) of the ticket, which the kernel writes and never changes as long as the owner leaves the file alone.
(Where fs.protected_hardlinks is 0, another user can change that time with a hard link to the ticket: it then waits as
if it were new. The link itself changes nothing: it is the same file, and counts once.) Two that each believe to be the
first have not seen the ticket of the other; both withdraw, and the next look decides. A ticket that could have taken
GPUs for 30 s and did not, because its process is stopped, is passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import struct
import time

from skyfab.host.ask.gpu_tools import look_at_gpus, user_name

TYPE_CHECKING = False  # importing `typing` would slow the start of a worker
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any, Final

FOLDER: Final = "/tmp"  # a folder of our own would belong to the user who made it
_NAME: Final = re.compile(r"skyfab-gpus\.(0|[1-9]\d{0,9})\.(ticket|hold|use)\.[0-9a-f]{16}")
_PUBLISHED: Final = 0o1644
"""The sticky bit keeps systemd-tmpfiles from deleting a file that is old."""
_MOST: Final = 4096
"""Bytes of a file."""
_GPUS: Final = 512
"""Numbers of GPUs are below this: also a list of all of them fits into a file."""
_PATIENCE: Final = 30.0
"""Seconds in which the first one takes GPUs that are free."""
REFUSE: Final = 2.0
"""Seconds after which GPUs are in use, for those who do not wait: another claim may be about to withdraw."""
_PAUSES: Final = (1.0, 30.0)
"""Seconds from one use of nvidia-smi to the next; they grow while GPUs stay in use."""
_BUSY: Final = 10
"""Percent of use above which a GPU without processes that can be seen is in use."""
QUEUED: Final = "SKYFAB_GPUS"
"""The variable of ranks that claim their GPUs before they start."""
_own: set[tuple[int, int]] = set()
"""The files of this process, by device and inode."""


class Lease:
    """What one file says. `kind`: "ticket", "hold", or "use" for GPUs that are used without a claim."""

    def __init__(self, kind: str, about: os.stat_result, said: dict[str, Any]) -> None:
        """Raises ValueError, TypeError or KeyError for content that is invalid."""
        gpus, count, run = said["gpus"], said["count"], said["run"]
        if not (0 < len(gpus) <= _GPUS and all(type(gpu) is int and 0 <= gpu < _GPUS for gpu in gpus)):
            raise ValueError("invalid GPUs")
        if type(count) is not int or not 0 <= count <= len(gpus) or type(run) is not str:
            raise ValueError("invalid lease")
        if said.get("kind", kind) != kind:  # a link to a file of another kind; earlier versions do not write it
            raise ValueError("invalid kind")
        if type(said["low"]) is not bool or type(said["waits"]) is not bool:
            raise ValueError("invalid lease")
        self.kind = kind
        self.gpus = tuple(gpus)
        """Those that it holds, or of which a ticket takes `count`."""
        self.count = max(1, count)
        self.run = "".join(letter for letter in run[:80] if letter.isprintable())
        self.low = said["low"]
        self.waits = said["waits"]
        """For a ticket: GPUs of low priority are freed for it. One that does not wait is soon withdrawn."""
        self.uid = about.st_uid
        self.seconds = max(0.0, time.time() - about.st_ctime)
        """Since when: a duration, because clocks differ."""
        self.order = (self.low, about.st_ctime_ns, about.st_ino)

    def overlaps(self, gpus: Collection[int]) -> bool:
        return any(gpu in gpus for gpu in self.gpus)

    @property
    def facts(self) -> dict[str, Any]:
        """For surveys."""
        about = {"user": user_name(self.uid), "run": self.run, "seconds": self.seconds, "text": str(self)}
        return {**about, "gpus": self.gpus, "waits": self.kind == "ticket"}

    def __str__(self) -> str:
        """``ada's night (node2, 4 GPUs, 3 h so far)``"""
        count = self.count if self.kind == "ticket" else len(self.gpus)
        priority = ", low priority" * self.low
        what = f"{os.uname().nodename}, {count} GPU{'s' * (count > 1)}, {age(self.seconds)} so far{priority}"
        return f"{user_name(self.uid)}'s {self.run or 'program'} ({what})"


def age(seconds: float) -> str:
    """
    >>> age(3.2), age(75), age(7200), age(200_000)
    ('3 s', '1 min', '2 h', '2 d')
    """
    units = (("d", 86400), ("h", 3600), ("min", 60))
    return next((f"{seconds / size:.0f} {unit}" for unit, size in units if seconds >= size), f"{seconds:.0f} s")


# ---- files


class _File:
    """A file of this process, published and locked until it is removed."""

    def __init__(self, folder: str, kind: str, said: dict[str, Any]) -> None:
        """Raises OSError, also for a folder in which others could remove the file."""
        content = json.dumps({**said, "kind": kind}).encode()
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"{folder} is not sticky: others could remove the files in it")
        while True:
            self.path = os.path.join(folder, f"skyfab-gpus.{os.geteuid()}.{kind}.{os.urandom(8).hex()}")
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            about = os.fstat(self.fd)
            self._key = (about.st_dev, about.st_ino)
            _own.add(self._key)
            try:
                _lock(self.fd)  # may wait for a process of the same user that looks at it
                if os.write(self.fd, content) < len(content):
                    raise OSError(f"the disk of {folder} is full")
                os.fchmod(self.fd, _PUBLISHED)
                self.about = os.fstat(self.fd)
            except BaseException:
                self.remove()
                raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self.path), self.about):
                    return
            self.remove()  # another process of this user has removed it as dead, before it was locked

    def remove(self) -> None:
        """Removes the name first: as long as it is there, the file is locked."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        _own.discard(self._key)
        os.close(self.fd)


def _lock(fd: int) -> None:
    if hasattr(fcntl, "F_OFD_SETLKW"):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.lockf(fd, fcntl.LOCK_EX)


def look(folder: str = FOLDER) -> list[Lease]:
    """All leases of other processes on this host, in the order of tickets. Removes dead files of this user.

    A run is listed once, even if several ranks have the same GPUs.
    """
    try:
        names = [name for name in os.listdir(folder) if name.startswith("skyfab-gpus.")]
    except OSError:
        return []
    leases = [lease for name in names if (lease := _read(folder, name)) is not None]
    found: dict[tuple[Any, ...], Lease] = {}
    for one in sorted(leases, key=lambda lease: lease.order):
        found.setdefault(one.order if one.kind == "ticket" else (one.uid, one.run, one.gpus), one)
    return list(found.values())


def _read(folder: str, name: str) -> Lease | None:
    """The lease in a file; None if it is dead, invalid, or of this process. Anybody may have made the file."""
    match = _NAME.fullmatch(name)
    path = os.path.join(folder, name)
    fd = -1
    try:
        about = os.lstat(path)
        if match is None or not stat.S_ISREG(about.st_mode) or (about.st_dev, about.st_ino) in _own:
            return None
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        about = os.fstat(fd)
        if (about.st_dev, about.st_ino) in _own:  # it was replaced by a link to a file of ours: closing would unlock it
            fd = -1
            return None
        if not stat.S_ISREG(about.st_mode) or about.st_nlink < 1 or about.st_uid != int(match[1]):
            return None
        if not _is_locked(fd):
            if about.st_uid == os.geteuid():
                os.unlink(path)  # while it has the read lock, nobody begins to use the file
            return None
        if about.st_mode & 0o777 != _PUBLISHED & 0o777:
            return None
        content = os.read(fd, _MOST + 1)
        return Lease(match[2], about, json.loads(content.decode("ascii"))) if len(content) <= _MOST else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def note_use(gpus: Sequence[int], run: str = "", folder: str = FOLDER) -> None:
    """Tells others that this process uses GPUs, until it ends. Nothing waits for it, and nothing is refused."""
    look(folder)  # removes what earlier processes have left
    with contextlib.suppress(OSError):
        _File(folder, "use", _said(gpus, len(gpus), run))


def note_rank(request: dict[str, Any]) -> None:
    """A rank of a gang notes which GPUs the ranks on its host use: one each, or all if there is one rank, or a call.

    Each of them does so: they are in use until the last one has ended. Not for ranks that wait for GPUs themselves
    (skyfab.host.supervise).
    """
    env, info = request["env"], request["info"]
    ranks = info.get("local_world_size", 1)
    if QUEUED not in env:
        gpus = visible(env, info["accelerators"])
        mine = gpus if ranks == 1 else gpus[:ranks]
        name = ""
        with contextlib.suppress(OSError, ValueError, KeyError):
            if request["run"]:
                with open(f"{request['run']}/about") as file:
                    name = str(json.load(file)["name"])
        if mine:
            note_use(mine, name)


def visible(env: Mapping[str, str], count: int) -> list[int]:
    """The numbers of the GPUs that a process with these variables may use, of `count`."""
    words = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [int(word) for word in words if word.strip().isdecimal()]


def _said(gpus: Iterable[int], count: int, run: str, *, low: bool = False, waits: bool = False) -> dict[str, Any]:
    return {"gpus": list(gpus), "count": count, "run": run[:80], "low": low, "waits": waits}


# ---- claims


class Claim:
    """A wish for `count` of the GPUs `among`; 0: for all that are free. `try_take` is called until it has them."""

    def __init__(
        self,
        count: int,
        among: Sequence[int],
        run: str = "",
        *,
        low: bool = False,
        waits: bool = True,
        folder: str = FOLDER,
    ) -> None:
        """With `low` priority, others come first; for one that `waits`, those of low priority give way."""
        self._count = count
        self._among = tuple(among)
        self._run = run
        self._low = low
        self._waits = waits
        self._folder = folder
        self._ticket: _File | None = None
        self._hold: _File | None = None
        self._idle: dict[tuple[Any, ...], float] = {}
        """Tickets before this one that could take GPUs, and since when."""
        self._busy: set[int] = set()
        self._busy_until = 0.0
        self._pause = _PAUSES[0]
        self.gpus: tuple[int, ...] = ()
        """Those that it holds."""
        self.reason = self.refusal = ""
        """Why it does not have them: with its place in the queue; and for one that does not wait."""
        self.warning = ""
        """Why it is not known whether other programs use GPUs, if that is so."""

    def try_take(self) -> bool:
        """Takes its place in the queue the first time; takes the GPUs if it is the first, and they are free.

        Raises OSError.
        """
        if self._hold is not None:
            return True
        if self._ticket is None:
            said = _said(self._among, self._count, self._run, low=self._low, waits=self._waits)
            self._ticket = _File(self._folder, "ticket", said)
        chosen = self._choose(look(self._folder))
        if not chosen:
            return False
        self._hold = _File(self._folder, "hold", _said(chosen, len(chosen), self._run, low=self._low))
        if any(one.kind != "ticket" and one.overlaps(chosen) for one in look(self._folder)):
            self._hold.remove()
            self._hold = None
            return False
        self.gpus = chosen
        self._ticket.remove()
        self._ticket = None
        return True

    def join(self, hold: str) -> bool:
        """Uses all GPUs `among`, which another process holds in a file of this name; False if that process has gone."""
        self._hold = _File(self._folder, "use", _said(self._among, len(self._among), self._run, low=self._low))
        self.gpus = self._among
        return _read(self._folder, hold) is not None

    @property
    def hold(self) -> str:
        """The name of the file that says what it holds."""
        return "" if self._hold is None else os.path.basename(self._hold.path)

    @property
    def fds(self) -> tuple[int, ...]:
        """Open files for programs on these GPUs, which keep the hold alive as long as they live."""
        return () if self._hold is None else (self._hold.fd,)

    def _choose(self, leases: Sequence[Lease]) -> tuple[int, ...]:
        """The GPUs to take; empty if it must wait. Sets `reason` and `refusal`."""
        holders = [one for one in leases if one.kind != "ticket" and one.overlaps(self._among)]
        taken = {gpu for one in holders for gpu in one.gpus}
        ahead = self._ahead(leases, taken)
        needed = max(1, self._count)
        free = [gpu for gpu in self._among if gpu not in taken]
        if not ahead and len(free) >= needed:
            free = [gpu for gpu in free if gpu not in self._in_use()]
            if len(free) >= needed:
                return tuple(free[: self._count or None])
        if before := [*holders, *ahead]:
            who = f"{before[0]}" + (f" and {len(before) - 1} more" if before[1:] else "")
            waits, self.refusal = f"after {who}", f"in use by {who}"
        else:
            numbers = ", ".join(map(str, sorted(self._busy.intersection(self._among))))
            waits = self.refusal = f"other programs use GPU {numbers} of {os.uname().nodename}"
        self.reason = f"{_ordinal(len(ahead) + 1)}, {waits}"
        return ()

    def _ahead(self, leases: Sequence[Lease], taken: set[int]) -> list[Lease]:
        """Tickets before this one that want GPUs of the same ones, without those that are passed over."""
        assert self._ticket is not None
        about = self._ticket.about
        order = (self._low, about.st_ctime_ns, about.st_ino)
        before = [one for one in leases if one.kind == "ticket" and one.order < order and one.overlaps(self._among)]
        now = time.monotonic()
        idle = {}
        for one in before:
            if len(set(one.gpus) - taken - self._busy) >= one.count:
                idle[one.order] = self._idle.get(one.order, now)
        self._idle = idle
        return [one for one in before if now - idle.get(one.order, now) < _PATIENCE]

    def _in_use(self) -> set[int]:
        """GPUs that programs use, with or without skyfab, as the tools say."""
        now = time.monotonic()
        if now >= self._busy_until:
            looked = look_at_gpus()
            self.warning = looked.get("gpu_error") or ""
            found = {gpu["index"] for gpu in looked["gpus"] if _is_busy(gpu)}
            self._pause = min(2 * self._pause, _PAUSES[1]) if found and found == self._busy else _PAUSES[0]
            self._busy, self._busy_until = found, now + self._pause
        return self._busy

    def should_give_way(self) -> bool:
        """Whether the first ticket of normal priority needs GPUs of this hold, and would have enough with them.

        Of several holds of low priority, the latest give way first.
        """
        leases = look(self._folder)
        waiting = (one for one in leases if one.kind == "ticket" and one.waits and not one.low)
        wanted = next((one for one in waiting if one.overlaps(self.gpus)), None)
        if self._hold is None or wanted is None:
            return False
        about = self._hold.about
        taken = {gpu for one in leases if one.kind != "ticket" for gpu in one.gpus}.union(self.gpus)
        missing = wanted.count - len(set(wanted.gpus) - taken - (self._in_use() - set(self.gpus)))
        low = [(one.order, one.gpus) for one in leases if one.kind == "hold" and one.low]
        low.append(((True, about.st_ctime_ns, about.st_ino), self.gpus))
        gain = {order: len(set(gpus).intersection(wanted.gpus)) for order, gpus in low}
        later = sum(count for order, count in gain.items() if order > low[-1][0])
        return later < missing <= sum(gain.values())

    def release(self) -> None:
        """Gives the GPUs back, or leaves the queue."""
        for file in (self._hold, self._ticket):
            if file is not None:
                file.remove()
        self._hold = self._ticket = None
        self.gpus = ()


def hold_free(gpus: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """Takes those that are free, until this process ends; or says why there are none. Another claim may withdraw."""
    claim = Claim(0, gpus, waits=False)
    until = time.monotonic() + REFUSE
    while gpus and not claim.try_take() and time.monotonic() < until:
        time.sleep(0.1)
    if not claim.gpus:
        claim.release()
    return claim.gpus, claim.refusal or "the host has none"


def _is_busy(gpu: dict[str, Any]) -> bool:
    return bool(gpu.get("processes")) or (gpu.get("use") or 0) > _BUSY


def _ordinal(number: int) -> str:
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
