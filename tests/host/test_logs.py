"""agent.logs: what a rank writes reaches the file and the client, in order and once, however slow the client is."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage.wire_pair import Pair, content

from skyfab.host.agent.logs import LogPipe
from skyfab.host.agent.run_folder import LogTimes
from skyfab.protocol import messages

STREAM = 2


class Writer:
    """The rank's end, never blocking this test."""

    def __init__(self, log: LogPipe) -> None:
        self._log = log
        os.set_blocking(log.sink, False)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._log.sink, rest) :]
            except BlockingIOError:
                assert self._log.drain()


@pytest.fixture
def pair() -> Pair:
    made = Pair()
    made.settle()
    return made


@contextlib.contextmanager
def opened(pair: Pair, path: Path | str) -> Iterator[LogPipe]:
    log = LogPipe(pair.a.mux, STREAM, str(path), worker="0", fd=1)
    try:
        yield log
    finally:
        log.close()
        with contextlib.suppress(OSError):
            os.close(log.sink)


def heard(pair: Pair) -> bytes:
    return bytes(pair.b.bodies.get(STREAM, b""))


def finish(pair: Pair, log: LogPipe) -> None:
    """The client takes everything."""
    while True:
        pair.settle()
        if not log.catch_up():
            return


def test_output_reaches_the_file_and_the_client(pair: Pair, tmp_path: Path) -> None:
    """Announced once, as this seat's stdout."""
    with opened(pair, tmp_path / "out") as log:
        writer = Writer(log)
        for number in range(5):
            writer.write(f"line {number}\n".encode())
            log.drain()
            pair.settle()
        assert heard(pair) == b"".join(b"line %d\n" % n for n in range(5))
        assert (tmp_path / "out").read_bytes() == heard(pair)
        assert not log.waiting
    assert [messages.decode(head) for _, head in pair.b.heads] == [messages.Log(worker="0", fd=1)]


def test_when_it_was_written_is_noted(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most once in 10 ms, with offsets in the file that is current, and for a clock that is set back too."""
    now = [1000.0]
    monkeypatch.setattr("skyfab.host.agent.run_folder.time.time", lambda: now[0])
    monkeypatch.setattr("skyfab.host.agent.logs._LARGE", 30)
    with opened(pair, tmp_path / "out") as log:
        log.times = LogTimes(str(tmp_path / "times"))
        for step, text in ((0, b"0123456789"), (0.004, b"0123456789"), (0.02, b"0123456789ab"), (1, b"x"), (-5, b"y")):
            now[0] += step
            os.write(log.sink, text)
            assert log.drain()
    expected = {"times.1": [(0, 1000.0), (20, 1000.024)], "times": [(0, 1001.024), (1, 996.024)]}
    for name, records in expected.items():
        found = (tmp_path / name).read_bytes()
        assert found == b"".join(b"%015d %015d\n" % (offset, round(when * 1000)) for offset, when in records)
        assert len(found) == 32 * len(records)


def test_a_client_that_is_away_costs_the_rank_nothing_and_loses_nothing(pair: Pair, tmp_path: Path) -> None:
    """The file is the buffer: memory stays bounded, and all of it is forwarded afterwards, in order."""
    data = content(1, 20_000_000)
    pair.cut()
    with opened(pair, tmp_path / "out") as log:
        Writer(log).write(data)
        while log.source in _readable(log.source):
            log.drain()
        assert pair.a.mux.queued(STREAM) < 4_000_000
        assert log.waiting
        for side in (pair.a, pair.b):
            pair.attach(side)
        finish(pair, log)
        assert heard(pair) == data
        assert (tmp_path / "out").read_bytes() == data


def _readable(fd: int) -> list[int]:
    return select.select([fd], [], [], 0)[0]


def test_new_output_does_not_overtake_what_waits_in_the_file(pair: Pair, tmp_path: Path) -> None:
    data = content(2, 8_000_000)
    with opened(pair, tmp_path / "out") as log:
        writer = Writer(log)
        for at in range(0, len(data), 700_000):
            writer.write(data[at : at + 700_000])
            log.drain()
            pair.a.flush(100_000)
            while pair.b.read():
                pass
            log.catch_up()
        while log.source in _readable(log.source):
            log.drain()
        finish(pair, log)
        assert heard(pair) == data


def test_a_mark_is_sent_once_everything_before_it_is_out(pair: Pair, tmp_path: Path) -> None:
    """An answer waits for what was written before it, and for nothing that is written after it."""
    with opened(pair, tmp_path / "out") as log:
        writer = Writer(log)
        writer.write(content(1, 3_000_000))
        while log.written < 3_000_000:  # the last part is still in the pipe
            log.drain()
        mark = log.written
        assert log.end < mark == 3_000_000
        assert not log.is_sent(mark)
        writer.write(b"more")
        while not log.is_sent(mark):
            log.drain()
            log.catch_up()
            pair.settle()
            writer.write(content(2, 300_000))
        assert len(heard(pair)) + 4_000_000 >= mark


def test_a_log_goes_on_behind_what_is_in_its_file_already(pair: Pair, tmp_path: Path) -> None:
    """A seat that is filled again writes to the same file; the old lines are not sent again."""
    (tmp_path / "out").write_bytes(b"before\n")
    with opened(pair, tmp_path / "out") as log:
        Writer(log).write(b"after\n")
        log.drain()
        finish(pair, log)
        assert heard(pair) == b"after\n"
        assert (tmp_path / "out").read_bytes() == b"before\nafter\n"


def test_a_process_that_never_stops_writing_does_not_hold_the_agent(pair: Pair) -> None:
    """`drain` returns however fast the other end is refilled."""
    with opened(pair, "/dev/null") as log:
        flood = subprocess.Popen(["yes"], stdout=log.sink)
        try:
            returned = threading.Event()

            def drain() -> None:
                for _ in range(50):
                    log.drain()
                returned.set()

            thread = threading.Thread(target=drain, daemon=True)
            thread.start()
            assert returned.wait(20), "drain() did not come back"
            thread.join()
        finally:
            flood.kill()
            flood.wait()


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond that: writes then fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_up_loses_no_line_while_the_client_is_away(pair: Pair, tmp_path: Path) -> None:
    """The process waits; afterwards comes what is in the file, then what no longer fitted, then the rest."""
    data = content(4, 8_000_000)
    pair.cut()
    with opened(pair, tmp_path / "out") as log, file_size_limit(4_000_000):
        rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log.sink)
        assert rank.stdin
        os.set_blocking(rank.stdin.fileno(), False)
        rest = memoryview(data)
        read = -1
        while read != log.end or (rest and select.select([], [rank.stdin], [], 0.2)[1]):
            read = log.end
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(rank.stdin.fileno(), rest) :]
            select.select([log.source], [], [], 0.2)
            log.drain()
        assert rest, "somewhere the process has to wait: neither the disk nor the memory takes it all"
        for side in (pair.a, pair.b):
            pair.attach(side)
        while rest:
            finish(pair, log)
            log.drain()
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(rank.stdin.fileno(), rest) :]
        rank.stdin.close()
        while len(heard(pair)) < len(data):
            select.select([log.source], [], [], 0.2)
            log.drain()
            finish(pair, log)
        rank.wait()
        assert heard(pair) == data


LINES = [f"line {number}\n".encode() for number in range(100, 200)]
"""Nine bytes each."""


def test_a_log_says_what_a_full_disk_did_not_take_and_continues_with_a_whole_line(pair: Pair, tmp_path: Path) -> None:
    """The client gets all of it; so a log that a detached run continues is as honest as one that it began."""
    with opened(pair, tmp_path / "out") as log:
        log.times = LogTimes(str(tmp_path / "times"))

        def say(data: bytes) -> None:
            os.write(log.sink, data)
            log.drain()

        with file_size_limit(9 * 20 + 4):
            for line in LINES[:40]:
                say(line)
            say(b"a long ")
        say(b"line without an end")
        assert (tmp_path / "out").stat().st_size == 9 * 20 + 4, "a line whose beginning is missing is not continued"
        say(b" yet\n" + b"".join(LINES[40:70]))
        for line in LINES[70:]:
            say(line)
        pair.settle()
        long = b"a long line without an end yet\n"
        assert heard(pair) == b"".join([*LINES[:40], long, *LINES[40:]])
    missing = 9 * 20 - 4 + len(long)
    notice = b"[skyfab: the disk was full: %d bytes of output are missing here]\n" % missing
    assert (tmp_path / "out").read_bytes() == b"".join([*LINES[:20], b"line", notice, *LINES[40:]])


def test_a_file_that_has_grown_large_is_followed_by_another(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them are kept, the client misses nothing, and what it has yet to hear is in the last one."""
    monkeypatch.setattr("skyfab.host.agent.logs._LARGE", 10_000)
    said = b"".join(b"line %d\n" % number for number in range(5_000))
    with opened(pair, tmp_path / "0.out") as log:
        writer = Writer(log)
        for at in range(0, len(said), 1_000):
            writer.write(said[at : at + 1_000])
            log.drain()
            pair.settle()
        log.catch_up()
        pair.settle()
        last, before = (tmp_path / "0.out").read_bytes(), (tmp_path / "0.out.1").read_bytes()
    assert said.endswith(before + last)
    assert 10_000 < len(before) < 20_000
    assert len(last) < 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.out", "0.out.1"]


def test_a_process_that_writes_more_than_its_client_takes_waits(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyfab.host.agent.logs._MOST", 100_000)
    with opened(pair, tmp_path / "0.out") as log:
        os.set_blocking(log.sink, False)
        with contextlib.suppress(BlockingIOError):  # the client takes nothing
            while True:
                os.write(log.sink, bytes(50_000))
                log.drain()
        assert log.stopped
        assert (tmp_path / "0.out").stat().st_size < 64 * 1024 * 1024


def test_a_full_disk_does_not_end_an_agent_that_writes_its_own_log() -> None:
    """It says there that a connection has ended, at any moment."""
    script = (
        "from skyfab.host.agent.logs import note; note('the connection has ended'); note('again'); print('goes on')"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, text=True, check=True
        )
    assert done.stdout == "goes on\n"
