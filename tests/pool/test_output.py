"""Output: everything a rank writes arrives, line by line, with its host and rank, and stays on the host in files."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from stage.remote import leave, wait_for
from stage.spot import Spot, until

import skyfab as sky
from skyfab.ui.events import Event, Output

if TYPE_CHECKING:
    from skyfab.lab import Lab

pytestmark = pytest.mark.lab


def lines(events: list[Event], stream: str = "stdout", rank: int | None = None) -> list[str]:
    return [e.text for e in events if isinstance(e, Output) and e.stream == stream and e.rank == rank]


def printf(text: str) -> None:
    """As C code prints: into a buffer of the C library's own."""
    ctypes.CDLL(None).printf(b"%s", text.encode())


# ---- where it comes from


def test_what_bypasses_python_arrives_too(pool: sky.Compute, events: list[Event]) -> None:
    """File descriptors, C code and child processes."""

    @sky.function
    def speak() -> None:
        os.write(1, b"by descriptor\n")
        printf("by C code\n")
        ctypes.CDLL(None).fflush(None)
        subprocess.run(["sh", "-c", "echo by a child; echo its error >&2"], check=True)
        os.system("echo by the shell")  # noqa: S605

    speak() >> pool
    assert lines(events) == ["by descriptor", "by C code", "by a child", "by the shell"]
    assert lines(events, "stderr") == ["its error"]


# ---- what a line is


def test_text_without_an_end_of_line_is_shown_when_the_call_ends(pool: sky.Compute, events: list[Event]) -> None:
    speak = sky.function(lambda text: print(text, end=""))
    node = pool.hosts[0].name
    pool.submit(speak("one\ntwo"), on=node).result(170)
    assert lines(events) == ["one", "two"]
    pool.submit(speak("three"), on=node).result(170)
    assert lines(events) == ["one", "two", "three"]


def test_a_progress_bar_is_seen_to_move(pool: sky.Compute, events: list[Event], spot: Spot) -> None:
    """Each state is shown by the time the next one is written, not when the call ends."""

    @sky.function
    def progress() -> None:
        for step in range(3):
            os.write(2, f"{step}\r".encode())
            os.write(2, f"{step + 1}".encode())
            wait_for(f"{folder}/step{step}")
            os.write(2, b"\r")

    folder = spot / ""
    future = progress() > pool
    for step in range(3):
        until(lambda step=step: str(step) in lines(events, "stderr"), "the next state of the progress bar")
        spot.leave(f"step{step}")
    future.result(170)


def test_bytes_that_are_no_text_do_no_harm(pool: sky.Compute, events: list[Event]) -> None:
    """They are shown as replacement characters; what is around them is intact."""

    @sky.function
    def speak() -> None:
        os.write(1, b"before \xff\xfe after\n")
        os.write(1, bytes(range(14, 256)) + b"\n")
        print("lone \ud800 surrogate")
        print("still here")

    speak() >> pool
    found = lines(events)
    assert found[0] == "before �� after"
    assert len(found) == 4
    assert found[2].startswith("lone ")
    assert found[3] == "still here"


def test_a_line_of_a_megabyte_arrives_whole_or_in_pieces(pool: sky.Compute, events: list[Event]) -> None:
    """No character is lost or cut, though most take several bytes."""
    sky.function(lambda: print("x" + "é\U0001f600日" * 120_000))() >> pool
    assert "".join(lines(events)) == "x" + "é\U0001f600日" * 120_000


# ---- whose it is


def test_lines_carry_the_host_and_rank_that_wrote_them(pool: sky.Compute, events: list[Event]) -> None:
    @sky.function
    def speak() -> None:
        for number in range(2000):
            print(f"rank {sky.instance_info().rank} line {number}")

    speak() @ pool
    for rank, node in enumerate(pool.hosts):
        assert lines(events, rank=rank) == [f"rank {rank} line {number}" for number in range(2000)]
        assert {e.host for e in events if isinstance(e, Output) and e.rank == rank} == {node.name}


# ---- a lot of it


def test_two_hundred_thousand_lines_arrive_once_in_order_before_the_call_returns(
    pool: sky.Compute, events: list[Event]
) -> None:
    @sky.function
    def flood() -> str:
        for number in range(200_000):
            print(f"line {number}")
        return "done"

    assert flood() >> pool == "done"
    assert lines(events) == [f"line {number}" for number in range(200_000)]


def test_a_slow_reader_does_not_hold_up_the_function(open_pool: Callable[..., sky.Compute], spot: Spot) -> None:
    """The subscriber takes no second line before the function has written its last: 20 MB wait in the host's file."""
    pool = open_pool("openssh", count=1, workdir="temp")  # a line says so where another pool uses the same folder
    found: list[str] = []

    def slow(event: Event) -> None:
        if isinstance(event, Output):
            found.append(event.text)
            if len(found) == 1:
                spot.wait("written")

    @sky.function
    def flood() -> None:
        for number in range(100_000):
            print(f"{number:0200d}")
        leave(note)

    note = spot / "written"
    pool.events.subscribe(slow)
    flood() >> pool
    assert found == [f"{number:0200d}" for number in range(100_000)]


@pytest.mark.slow
def test_a_program_whose_output_is_not_read_keeps_its_hosts(lab: Lab, tmp_path: Path) -> None:
    """`train.py | less`, or Ctrl-S: longer than the lease, with more output than a pipe holds."""
    program = f"""
        import os, time
        import skyfab as sky

        @sky.function
        def speak(lines):
            for number in range(lines):
                print(f"line {{number}}")
            return os.getpid()

        if __name__ == "__main__":
            with sky.Compute("node1", inventory={str(lab.inventory)!r}, lease=1.5, ui="plain") as pool:
                first = (speak(20_000) > pool).result()
                end = time.monotonic() + 4
                while time.monotonic() < end:
                    assert (speak(1) > pool).result() == first
                    assert len(speak(1) @ pool) == 1
                open({str(tmp_path / "well")!r}, "w").close()
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            until(lambda: (tmp_path / "well").exists() or running.poll() is not None, "the end of its calls")
        finally:
            said = running.stdout.read().splitlines()  # whoever reads at last gets all of it
    assert running.returncode == 0
    assert [line for line in said if line.startswith("node1 ")][:20_000] == [f"node1 line {n}" for n in range(20_000)]


# ---- files


def test_everything_is_kept_in_files_on_the_host(
    lab: Lab, home: Path, transport: str, open_pool: Callable[..., sky.Compute]
) -> None:
    """Also after the pool is closed, and also what was not text."""
    pool = open_pool(transport, count=1)
    mark = f"mark-{time.time_ns()}"

    @sky.function
    def speak() -> None:
        print(mark)
        os.write(1, b"raw \xff bytes, no end")
        print(mark, file=sys.stderr)

    speak() >> pool
    speak() @ pool
    pool.close()
    if transport == "local":
        cache = home / "cache1"
    elif lab.hosts[0].cache is not None:
        cache = Path(lab.hosts[0].cache)
    else:
        cache = lab.hosts[0].path("/home/ada/.cache/skyfab" if transport == "fabric" else "/root/.cache/skyfab")
    kept = [path.read_bytes() for path in cache.glob("logs/*/*") if mark.encode() in path.read_bytes()]
    assert sorted(kept) == sorted(2 * [f"{mark}\n".encode()] + 2 * [f"{mark}\n".encode() + b"raw \xff bytes, no end"])


# ---- who may speak


def both_orders(decorate: Callable[[Any], Any], fn: Callable[..., Any]) -> list[Any]:
    return [sky.function(decorate(fn)), decorate(sky.function(fn))]


def shout() -> int:
    print("from python")
    print("error", file=sys.stderr)
    os.write(1, b"from a descriptor\n")
    printf("from C\n")
    subprocess.run(["echo", "from a child"], check=True)
    return 5


LOUD = sorted(["from python", "from a descriptor", "from a child", "from C"])
"""In any order: when the C library flushes is its own matter."""


@pytest.mark.parametrize(
    ("limit", "loud", "errors"),
    [
        (sky.stdout(only=lambda info: info.rank == 1), [1], [0, 1]),
        (sky.silent, [], []),
        (lambda fn: sky.stdout(only="head")(sky.stderr(only=lambda info: False)(fn)), [0], []),
    ],
    ids=["predicate", "silent", "both"],
)
def test_limits_hold_for_c_code_and_children_too(
    pool: sky.Compute, events: list[Event], limit: Callable[[Any], Any], loud: list[int], errors: list[int]
) -> None:
    for limited in both_orders(limit, shout):
        events.clear()
        assert limited() @ pool == [5, 5]
        for rank in (0, 1):
            assert sorted(lines(events, rank=rank)) == (LOUD if rank in loud else [])
            assert lines(events, "stderr", rank=rank) == (["error"] if rank in errors else [])


def test_what_was_written_before_a_silent_part_is_not_swallowed(pool: sky.Compute, events: list[Event]) -> None:
    """C code's buffer is flushed at the border, not when it is full."""

    @sky.function
    def mixed() -> None:
        printf("before\n")
        sky.silent(shout)()
        printf("after\n")

    mixed() >> pool
    assert lines(events) == ["before", "after"]


# ---- hostile to its own output


def test_a_function_that_takes_its_output_apart_still_returns(pool: sky.Compute) -> None:
    @sky.function
    def tear(how: str) -> str:
        if how == "sys.stdout.close":
            sys.stdout.close()
            sys.stderr.close()
        elif how == "os.close":
            os.close(1)
            os.close(2)
        elif how == "dup2":
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        else:
            sys.stdout = sys.stderr = None  # type: ignore[assignment]
        return how

    node = pool.hosts[0].name
    for how in ("sys.stdout.close", "None", "dup2", "os.close"):
        assert pool.submit(tear(how), on=node).result(170) == how
        assert pool.submit(sky.function(abs)(-3), on=node).result(170) == 3


def test_a_function_that_closes_every_descriptor_is_an_error_and_not_a_hang(pool: sky.Compute) -> None:
    node = pool.hosts[0].name
    with pytest.raises(sky.WorkerDied):
        pool.submit(sky.function(lambda: os.closerange(3, 1000))(), on=node).result(170)
    assert pool.submit(sky.function(abs)(-3), on=node).result(170) == 3
