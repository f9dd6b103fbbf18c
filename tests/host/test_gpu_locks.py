"""GPU leases between processes and users: who may hold a GPU, in which order, and what hostile files can do."""

# The calls of the system are what these tests are about.
# ruff: noqa: PTH102, PTH104, PTH108, PTH116, PTH208, PTH211
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyfab.errors import HostUnfit
from skyfab.host import gpu_locks
from skyfab.host.ask.gpu_tools import user_name
from skyfab.host.gpu_locks import Claim, look, note_use
from skyfab.host.supervise import _Rank

USERS = (61001, 61002, 61003) if os.geteuid() == 0 else (os.geteuid(),) * 3
"""Three users; where this one cannot become another, three times the same."""
LONG = 60.0
"""Seconds after which something that must happen is missing."""
SAID = {"gpus": [0], "count": 1, "run": "night", "low": False, "waits": True}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder that all users can write to, as /tmp; and no GPUs that other programs could use."""
    monkeypatch.setattr(gpu_locks, "look_at_gpus", lambda: {"gpus": []})
    made = tempfile.mkdtemp()
    Path(made).chmod(0o1777)
    yield made
    shutil.rmtree(made, ignore_errors=True)


class Process:
    """A child process that runs a function as a user, and is killed at the latest at the end of the block.

    The function is passed another one, to be called when the parent, which waits in `heard`, may continue.
    """

    def __init__(self, uid: int, function: Callable[[Callable[[], object]], object]) -> None:
        self._said, saying = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                gpu_locks._own.clear()  # those of the parent, whose locks a child does not have
                if os.geteuid() != uid:
                    os.setgroups([])
                    os.setgid(uid)
                    os.setuid(uid)
                function(lambda: os.write(saying, b"!"))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(saying)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.kill()
        os.close(self._said)

    def heard(self) -> None:
        assert os.read(self._said, 1) == b"!"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def ended(self) -> int:
        """Waits for the end: its exit code, or minus the signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._said)
        return code


Say = Callable[[], object]


def take(claim: Claim, timeout: float = LONG) -> Claim:
    """Waits until it has its GPUs."""
    until = time.monotonic() + timeout
    while not claim.try_take():
        assert time.monotonic() < until, claim.reason
        time.sleep(0.02)
    return claim


def holder(folder: str, *, uid: int = USERS[0], gpus: tuple[int, ...] = (0,), low: bool = False) -> Process:
    """A process that holds GPUs until it is killed; returns when it has them."""

    def hold(say: Say) -> None:
        take(Claim(len(gpus), gpus, "night", low=low, folder=folder))
        say()
        time.sleep(LONG)

    process = Process(uid, hold)
    process.heard()
    return process


def names(folder: str) -> list[str]:
    return sorted(os.listdir(folder))


# ---- many processes


def state_of(pid: str) -> str:
    """That of a process: Z if it has ended, empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def mark(path: str) -> None:
    """Creates a file that must not exist, except one that a killed process has left."""
    while True:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                owner = Path(path).read_text()
                while state_of(owner) not in ("Z", "X", ""):  # it is ending, or it holds the same GPU
                    time.sleep(0.001)
                os.rename(path, f"{path}.{owner}")  # fails if the owner has removed it: it was not killed
                continue
            raise AssertionError("two processes hold a GPU") from None
        os.write(fd, str(os.getpid()).encode())
        os.close(fd)
        return


def use(folder: str, marks: str, seed: int) -> None:
    """Takes GPUs, marks them for a moment, and gives them back; or is killed while it waits or holds them."""
    chance = random.Random(seed)
    claim = Claim(chance.choice((1, 1, 2, 3, 4)), (0, 1, 2, 3), f"run{seed}", folder=folder)
    fate = chance.random()
    if fate < 0.1:
        claim.try_take()
        os.kill(os.getpid(), signal.SIGKILL)
    take(claim)
    for gpu in claim.gpus:
        mark(f"{marks}/{gpu}")
    time.sleep(chance.uniform(0, 0.1))
    if fate < 0.35:
        os.kill(os.getpid(), signal.SIGKILL)
    for gpu in claim.gpus:
        os.unlink(f"{marks}/{gpu}")
    claim.release()


def test_forty_tickets_of_three_users_never_hold_the_same_gpu(folder: str) -> None:
    marks = tempfile.mkdtemp()
    Path(marks).chmod(0o777)
    rounds = [Process(USERS[seed % 3], lambda _, seed=seed: use(folder, marks, seed)) for seed in range(40)]
    try:
        ended = [process.ended() for process in rounds]
    finally:
        shutil.rmtree(marks)
    assert set(ended) == {0, -signal.SIGKILL}, "one holds the same GPU as another, or starves"
    assert ended.count(0) > 15
    for uid in set(USERS):
        assert Process(uid, lambda _: look(folder)).ended() == 0
    assert names(folder) == [], "what killed processes leave is removed by the next one of their user"


def test_a_hold_that_appears_in_between_is_respected(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another process takes the GPU after this one has found it free, and before it has published its hold."""
    claim = Claim(1, (0,), folder=folder)
    choose = Claim._choose
    others: list[Process] = []

    def slowly(self: Claim, leases: list[gpu_locks.Lease]) -> tuple[int, ...]:
        chosen = choose(self, leases)
        if self is claim and not others:
            monkeypatch.setattr(gpu_locks.Claim, "_ahead", lambda *_: [])  # the other one ignores the order
            others.append(holder(folder, uid=USERS[1]))
        return chosen

    monkeypatch.setattr(Claim, "_choose", slowly)
    assert not claim.try_take()
    assert [one.kind for one in look(folder)] == ["hold"]
    with others[0]:
        assert not claim.try_take()
    assert claim.try_take()
    claim.release()


def test_a_killed_holder_frees_its_gpus(folder: str) -> None:
    claim = Claim(1, (0,), folder=folder)
    with holder(folder, uid=USERS[0]) as process:
        assert not claim.try_take()
        process.kill()
        take(claim, 10)
    claim.release()


def test_a_rank_that_has_joined_a_hold_keeps_its_gpus(folder: str) -> None:
    """The one that has taken them is killed: they are free when the other one is gone, too."""

    def join(say: Say) -> None:
        assert Claim(1, (0,), "night", folder=folder).join(names(folder)[0])
        say()
        time.sleep(LONG)

    claim = Claim(1, (0,), folder=folder)
    with holder(folder, uid=USERS[0]) as first:
        (hold,) = names(folder)
        with Process(USERS[0], join) as second:
            second.heard()
            assert [one.run for one in look(folder)] == ["night"], "a run is listed once"
            first.kill()
            assert not claim.try_take()
            assert claim.refusal.startswith(f"in use by {user_name(USERS[0])}'s night (")
        late = Claim(1, (0,), folder=folder)
        assert not late.join(hold)
        late.release()
    take(claim, 10)
    claim.release()


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="locks belong to processes")
def test_a_program_keeps_the_gpus_of_the_process_that_has_started_it(folder: str) -> None:
    def start(say: Say) -> None:
        held = take(Claim(1, (0,), "night", folder=folder))
        program = subprocess.Popen(["sleep", str(LONG)], pass_fds=held.fds)
        Path(f"{folder}/pid").write_text(str(program.pid))
        say()
        time.sleep(LONG)

    claim = Claim(1, (0,), folder=folder)
    with Process(USERS[0], start) as process:
        process.heard()
        process.kill()
        assert not claim.try_take()
        os.kill(int(Path(f"{folder}/pid").read_text()), signal.SIGKILL)
        take(claim, 10)
    claim.release()


def test_first_come_first_served(folder: str) -> None:
    """One that needs all GPUs is not overtaken by those that need few."""
    first, large, small = (Claim(count, (0, 1), folder=folder) for count in (1, 2, 1))
    with holder(folder, gpus=(0,), uid=USERS[1]) as process:
        claims: list[tuple[str, Claim]] = [("large", large), ("small", small)]
        order = tempfile.mkdtemp()
        children = []
        for name, claim in claims:

            def wait(_: Say, name: str = name, claim: Claim = claim) -> None:
                take(claim)
                Path(f"{order}/{name}").write_text(str(time.monotonic_ns()))
                time.sleep(0.1)

            children.append(Process(os.geteuid(), wait))
            while len([one for one in look(folder) if one.kind == "ticket"]) < len(children):
                time.sleep(0.01)
        time.sleep(0.3)
        assert os.listdir(order) == [], "a GPU is free, but the first of the queue needs two"
        assert not first.try_take()
        assert first.reason.startswith("3rd, after ")
        first.release()
        process.kill()
        for child in children:
            assert child.ended() == 0
    assert Path(f"{order}/large").read_text() < Path(f"{order}/small").read_text()
    shutil.rmtree(order)


def test_all_that_are_free(folder: str) -> None:
    with holder(folder, gpus=(1,)):
        claim = Claim(0, (0, 1, 2), folder=folder)
        assert claim.try_take()
        assert claim.gpus == (0, 2)
        claim.release()


def test_gpus_that_programs_use_without_skyfab_are_not_taken(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"index": 0, "processes": [{"pid": 1}]}, {"index": 1, "use": 95}, {"index": 2, "use": 3, "processes": []}
    monkeypatch.setattr(gpu_locks, "look_at_gpus", lambda: {"gpus": busy})
    claim = Claim(0, (0, 1, 2), folder=folder)
    assert claim.try_take()
    assert claim.gpus == (2,)
    waits = Claim(1, (0, 1), folder=folder)
    assert not waits.try_take()
    assert waits.reason == f"1st, other programs use GPU 0, 1 of {os.uname().nodename}"
    waits.release()
    claim.release()


def test_use_without_a_claim_is_seen(folder: str) -> None:
    """Ranks of other gangs are not refused, but the queue waits for them."""

    def rank(say: Say) -> None:
        note_use([0, 1], "train", folder)
        say()
        time.sleep(LONG)

    claim = Claim(1, (0,), folder=folder)
    with Process(USERS[0], rank) as process:
        process.heard()
        assert not claim.try_take()
        assert [(one.kind, one.gpus, one.run) for one in look(folder)] == [("use", (0, 1), "train")]
        process.kill()
        assert claim.try_take()
    claim.release()


def test_a_stopped_process_at_the_head_of_the_queue_is_passed_over(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_locks, "_PATIENCE", 0.5)

    def wait(say: Say) -> None:
        gpu_locks.Claim._choose = lambda *_: ()  # type: ignore[method-assign]
        claim = Claim(1, (0,), folder=folder)
        claim.try_take()
        say()
        signal.pause()

    with Process(USERS[1], wait) as process:
        process.heard()
        os.kill(process.pid, signal.SIGSTOP)
        claim = Claim(1, (0,), folder=folder)
        assert not claim.try_take()
        take(claim, 20)
        claim.release()


# ---- low priority


def low_gives_way(folder: str, low: Claim, count: int, among: tuple[int, ...]) -> bool:
    """Whether a hold of low priority gives way to a ticket."""

    def wait(say: Say) -> None:
        claim = Claim(count, among, folder=folder)
        claim.try_take()
        say()
        time.sleep(LONG)

    with Process(USERS[1], wait) as process:
        process.heard()
        return low.should_give_way()


def test_low_priority_gives_way_where_that_helps(folder: str) -> None:
    low = Claim(1, (0,), low=True, folder=folder)
    assert low.try_take()
    assert not low.should_give_way(), "nobody waits"
    assert low_gives_way(folder, low, 1, (0,))
    assert not low_gives_way(folder, low, 1, (0, 1)), "GPU 1 is free"
    assert not low_gives_way(folder, low, 1, (2,))
    with holder(folder, gpus=(1,)):
        assert low_gives_way(folder, low, 1, (0, 1))
        assert not low_gives_way(folder, low, 2, (0, 1)), "another one holds GPU 1: it would not be enough"
    with holder(folder, gpus=(1,), low=True):
        assert not low_gives_way(folder, low, 1, (0, 1)), "the later one gives way"
        assert low_gives_way(folder, low, 2, (0, 1))
    low.release()


def test_normal_priority_goes_first(folder: str) -> None:
    low = Claim(1, (0,), low=True, folder=folder)
    with holder(folder) as process:
        assert not low.try_take()

        def wait(say: Say) -> None:
            claim = Claim(1, (0,), folder=folder)
            claim.try_take()
            say()
            take(claim)
            say()
            time.sleep(LONG)

        with Process(USERS[2], wait) as normal:
            normal.heard()
            process.kill()
            normal.heard()
            assert not low.try_take()
        assert low.try_take()
    low.release()


# ---- clocks


def test_clocks_that_jump_do_no_harm(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the order of tickets is another one at each look: never two hold a GPU, and all get theirs."""
    chance = random.SystemRandom()  # processes that are forked do not share it
    order = property(lambda lease: (lease.low, chance.randrange(4 * 10**18), 0), lambda lease, _: None)
    monkeypatch.setattr(gpu_locks.Lease, "order", order, raising=False)
    marks = tempfile.mkdtemp()
    Path(marks).chmod(0o777)
    rounds = [Process(USERS[seed % 3], lambda _, seed=seed: use(folder, marks, seed)) for seed in range(40, 50)]
    ended = [process.ended() for process in rounds]
    shutil.rmtree(marks)
    assert set(ended) == {0, -signal.SIGKILL}


# ---- hostile files


def hostile(folder: str, uid: int, kind: str, content: bytes = b"", mode: int = 0o644) -> str:
    """A file with a valid name, for a user, with any content."""
    path = f"{folder}/skyfab-gpus.{uid}.{kind}.{os.urandom(8).hex()}"
    Path(path).write_bytes(content)
    Path(path).chmod(mode)
    return path


def attack(folder: str, say: Say) -> None:
    """As another user: everything that somebody can put into /tmp, which stays there."""
    me, victim = os.geteuid(), USERS[0]
    content = json.dumps(SAID).encode()
    kept = []

    def locked(path: str) -> None:
        kept.append(os.open(path, os.O_RDWR))
        fcntl.lockf(kept[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)

    for kind in ("ticket", "hold", "use"):
        os.symlink("/etc/passwd", f"{folder}/skyfab-gpus.{me}.{kind}.{'1' * 16}")
        os.symlink("/dev/zero", f"{folder}/skyfab-gpus.{victim}.{kind}.{'2' * 16}")
        os.mkfifo(f"{folder}/skyfab-gpus.{me}.{kind}.{'3' * 16}", 0o644)
        os.mkdir(f"{folder}/skyfab-gpus.{me}.{kind}.{'4' * 16}")
        if me != victim:
            locked(hostile(folder, victim, kind, content))  # in the name of another user
        locked(hostile(folder, me, kind, content + b" " * 5000))
        big = hostile(folder, me, kind)
        os.truncate(big, 1 << 40)
        locked(big)
        for said in (
            *(b"", b"\0\xff", b"[" * 4000, b"null", b"[]", b"{}", b'{"gpus": 0}', b"1e999"),
            *(json.dumps({**SAID, **bad}).encode() for bad in _BAD),
        ):
            locked(hostile(folder, me, kind, said))
        hostile(folder, me, kind, content)  # not locked: dead
    for name in (".x", "..", ".61001.hold.zz", f".{'9' * 30}.hold.{'6' * 16}", f".٣.hold.{'6' * 16}"):
        with contextlib.suppress(OSError):
            Path(f"{folder}/skyfab-gpus{name}").write_bytes(content)
    say()
    time.sleep(LONG)


_BAD: tuple[dict[str, object], ...] = (
    {"gpus": []},
    {"gpus": [-1]},
    {"gpus": [True]},
    {"gpus": ["0"]},
    {"gpus": [10**9]},
    {"gpus": {"0": 0}},
    {"gpus": None},
    {"count": -1},
    {"count": "1"},
    {"count": 2},  # of one GPU: it would wait for ever, and others behind it
    {"count": 10**30},
    {"run": None},
    {"low": "no"},
    {"waits": 1},
    {"kind": "other"},
)


def test_hostile_files_harm_nobody(folder: str) -> None:

    def victim(_: Say) -> None:
        assert look(folder) == []
        claim = Claim(1, (0,), folder=folder)
        assert claim.try_take()
        note_use([0], "x", folder)
        claim.release()

    with Process(USERS[1], lambda say: attack(folder, say)) as attacker:
        attacker.heard()
        assert Process(USERS[0], victim).ended() == 0


def test_a_reader_that_locks_everything_hinders_nobody(folder: str) -> None:
    """Read locks on a file that is published do not exist while its owner lives, and do not make it live longer."""

    def read_locks(say: Say) -> None:
        held: dict[str, int] = {}
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            for name in os.listdir(folder):
                if name not in held:
                    with contextlib.suppress(OSError):
                        held[name] = os.open(f"{folder}/{name}", os.O_RDONLY)
            for fd in held.values():
                with contextlib.suppress(OSError):
                    fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    say()
            time.sleep(0.001)

    with Process(USERS[1], read_locks) as reader, holder(folder) as process:
        claim = Claim(1, (0,), folder=folder)
        assert not claim.try_take()
        process.kill()
        reader.heard()  # now the dead file is locked
        take(claim, 10)
        assert claim.gpus == (0,)
        claim.release()


def test_nobody_else_can_take_or_free_a_hold(folder: str) -> None:
    """Another user can neither lock a file, nor remove it; of one's own files only the lock matters."""
    claim = Claim(1, (0,), folder=folder)
    assert claim.try_take()
    (name,) = names(folder)
    path = f"{folder}/{name}"

    def other(_: Say) -> None:
        if os.geteuid() != os.stat(path).st_uid:
            for harm in (os.unlink, lambda path: os.open(path, os.O_RDWR), lambda path: os.rename(path, f"{path}0")):
                with pytest.raises(PermissionError):
                    harm(path)
        fd = os.open(path, os.O_RDONLY)
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            with pytest.raises(OSError):
                fcntl.lockf(fd, kind | fcntl.LOCK_NB)
        assert [one.gpus for one in look(folder)] == [(0,)]

    assert Process(USERS[1], other).ended() == 0
    claim.release()


def test_a_hard_link_to_a_hold_neither_frees_it_nor_forges_another(folder: str) -> None:
    """Another user can make one where fs.protected_hardlinks is 0."""
    with holder(folder) as process:
        (name,) = names(folder)
        for kind in ("ticket", "hold", "use"):
            os.link(f"{folder}/{name}", f"{folder}/skyfab-gpus.{USERS[0]}.{kind}.{'7' * 16}")
        assert [(one.kind, one.gpus) for one in look(folder)] == [("hold", (0,))]
        claim = Claim(1, (0,), folder=folder)
        assert not claim.try_take()
        process.kill()
        take(claim, 10)
        claim.release()


def test_a_link_to_its_own_file_does_not_make_a_process_lose_its_lock(folder: str) -> None:
    """Closing any descriptor of a file releases all POSIX locks that the process has on it."""
    claim = Claim(1, (0,), folder=folder)
    assert claim.try_take()
    (name,) = names(folder)
    real, open_ = os.lstat, os.open
    with pytest.MonkeyPatch.context() as patch:
        decoy = hostile(folder, os.geteuid(), "hold", json.dumps(SAID).encode())
        about = real(decoy)
        os.unlink(decoy)
        os.link(f"{folder}/{name}", decoy)  # after lstat, as an attacker would where the kernel allows such links
        patch.setattr(os, "lstat", lambda path: about if path == decoy else real(path))
        opened: list[int] = []
        patch.setattr(os, "open", lambda *words: opened.append(open_(*words)) or opened[-1])
        look(folder)
    os.unlink(decoy)

    def other(_: Say) -> None:
        assert [one.gpus for one in look(folder)] == [(0,)]

    assert Process(os.geteuid(), other).ended() == 0
    claim.release()
    os.close(opened.pop())


def test_a_folder_in_which_others_can_remove_files_is_refused(folder: str) -> None:
    Path(folder).chmod(0o777)
    with pytest.raises(PermissionError, match="is not sticky"):
        Claim(1, (0,), folder=folder).try_take()
    assert names(folder) == []


@pytest.mark.parametrize("named", ["MIG-8a1b,MIG-8a1c", None])
def test_gpus_that_have_names_and_no_numbers_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if named is None else {"CUDA_VISIBLE_DEVICES": named})
    rank = _Rank.__new__(_Rank)
    rank._gpus = {"count": 1}
    with pytest.raises(HostUnfit, match="it has 0 GPUs, but the run needs 1") as refused:
        rank._on_take({})
    hint = f"CUDA_VISIBLE_DEVICES is {named!r}: only GPUs named by number count"
    assert refused.value.hint == (hint if named else None)
