"""The screen of `skyfab top` without a terminal: what is on it at several widths, and what keys do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.cells import cell_len

from skyfab.detached.folder import About, Part
from skyfab.errors import HostUnfit, Unreachable
from skyfab.inspect.survey import Gpu, Survey
from skyfab.inspect.top.fullscreen import decode
from skyfab.inspect.top.monitor import Seen
from skyfab.inspect.top.snapshot import Snapshot, snapshot
from skyfab.inspect.top.view import Action, View, panes
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory

NOW = 1_800_000_000.0
CLOCK = 1000.0
BARE = Survey(
    os="Debian GNU/Linux 12 (bookworm)", kernel="6.1", python="3.11.2", cpus=8, load=0.5, memory=64 * 10**9,
    memory_free=50 * 10**9, disk=10**12, disk_free=5 * 10**11,
)  # fmt: skip
H100 = Gpu(index=0, name="NVIDIA H100", memory=80 * 10**9, memory_used=10**9, use=0)


def seen(name: str, survey: Survey | None = BARE, **changes: object) -> Seen:
    known = {"heard": CLOCK - 1} if survey else {}
    return Seen(host=Host(name=name, address="10.0.0.1", user="ada"), survey=survey, **{**known, **changes})  # type: ignore[arg-type]


def part(number: int, *hosts: str, state: str = "running", last: str = "step 1", place: int = 0) -> Part:
    about = About(
        id=f"{number:016x}", name=f"run{number}", function="train", hosts=hosts, place=place, ranks=(place,),
        world=len(hosts), on="all", elastic=False,
    )  # fmt: skip
    return Part(host=hosts[place], about=about, state=state, started=NOW - 60 * number, last=last)  # type: ignore[arg-type]


def made(hosts: Sequence[Seen]) -> Snapshot:
    return snapshot(hosts, Inventory(hosts={one.host.name: one.host for one in hosts}), every=2, clock=CLOCK, now=NOW)


def plain(lines: Sequence[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def screen(found: Snapshot, columns: int, lines: int = 24, view: View | None = None) -> list[str]:
    """The lines, each of which has exactly the width of the screen."""
    shown = plain((view or View()).tables(found, columns, lines))
    assert [cell_len(line) for line in shown] == [columns] * lines
    return [line.rstrip() for line in shown]


# ---- what is shown


@pytest.mark.parametrize("columns", [20, 80, 200])
@pytest.mark.parametrize("count", [1, 64])
def test_every_line_has_the_width_of_the_screen(columns: int, count: int) -> None:
    """With long names, wide characters, control characters, hosts that are lost, and more than there is room for."""
    names = [f"{'a-very-long-name-of-a-host-' * (n % 3)}node{n}" for n in range(count)]
    hosts = [seen(name, replace(BARE, os="計算機 Linux")) for name in names]
    last = "損失 0.25 \x1b[31mred\x1b[2J\r\x07 " + "x" * 500
    hosts[0] = replace(hosts[0], parts=(part(1, names[0], last=last), part(2, names[0], state="done")))
    hosts[-1] = replace(hosts[-1], error=Unreachable("no route\x1b[2J to host " + "y" * 300, host=names[-1]))
    shown = screen(made(hosts), columns)
    assert not any(char in "".join(shown) for char in "\x1b\r\x07")
    assert shown[1].startswith("host")
    assert any(line.startswith("0000000") for line in shown)


def test_a_host_that_does_not_answer_says_since_when() -> None:
    hosts = [
        seen("new", None),
        seen("late", heard=CLOCK - 42),
        seen("lost", heard=CLOCK - 90, error=Unreachable("no route to host", host="lost")),
        seen("unfit", None, error=HostUnfit("it has no Python", host="unfit")),
    ]
    shown = screen(made(hosts), 120)
    assert shown[0].startswith("4 hosts: 1 connecting, 1 late, 2 lost")
    assert shown[2].endswith("  connecting")
    assert shown[3].endswith("  no response for 42 s")
    assert shown[4].endswith("  last heard 2 min ago: no route to host")
    assert shown[5].endswith("  it has no Python")


def test_runs_are_of_all_their_hosts_and_those_that_run_come_first() -> None:
    both = ("node1", "node2")
    one = seen("node1", parts=(part(1, "node1", state="done"), part(3, *both, last="0 %\r50 %")))
    two = seen("node2", parts=(part(3, *both, place=1), part(2, "node2", last="損失 0.25")))
    shown = screen(made([one, two]), 120)
    assert shown[0].endswith("3 runs, 2 running")
    assert [line.split()[1] for line in shown[5:8]] == ["running", "running", "done"]
    assert shown[5].endswith("損失 0.25")
    assert "3 min      2  node1, node2  run3  50 %" in shown[6]
    lost = replace(two, error=Unreachable("no route to host", host="node2"))
    shown = screen(made([one, lost]), 120)
    assert {line[:8]: line.split()[1] for line in shown[5:8]}["0" * 8] in ("unreachable", "running", "done")
    assert "unreachable" in shown[6], "it is unknown whether it still runs"


def test_a_run_that_is_too_old_for_one_of_its_hosts_is_not_shown() -> None:
    hosts = [seen("node1"), seen("node2", parts=(part(1, "node1", "node2", place=1, state="done"),))]
    assert screen(made(hosts), 120)[0].endswith("no runs")
    hosts[0] = seen("node1", error=Unreachable("no route to host", host="node1"))
    assert screen(made(hosts), 120)[0].endswith("1 run, 0 running")


# ---- keys


def crowd(count: int = 64, runs: int = 10) -> Snapshot:
    first = seen("node1", parts=tuple(part(n, "node1") for n in range(1, runs + 1)))
    return made([first, *(seen(f"node{n}") for n in range(2, count + 1))])


def pressed(found: Snapshot, *keys: str, lines: int = 24, view: View | None = None) -> tuple[View, Action | None]:
    now, action = view or View(), None
    for key in keys:
        action = now.press(key, found, lines)
    return now, action


def bar(found: Snapshot, view: View, lines: int = 24) -> str:
    """The line that is selected."""
    (line,) = [line for line in view.tables(found, 100, lines)[:-1] if line.startswith("\x1b[7m")]
    return plain([line])[0].split()[0]


def test_pages_ends_and_panes() -> None:
    found = crowd()
    hosts, runs = panes(found, 24)
    assert (hosts, runs) == (14, 6)
    assert pressed(found, "pagedown")[0].selected == f"node{1 + hosts}"
    assert pressed(found, "pagedown", "pageup", "up", "k")[0].selected == "node1"
    assert pressed(found, "end")[0].selected == f"{10:016x}"
    assert pressed(found, "end", "home")[0].selected == "node1"
    assert pressed(found, "tab")[0].selected == f"{1:016x}"
    assert pressed(found, "tab", "tab")[0].selected == "node1"
    assert pressed(crowd(runs=0), "tab", "x")[0].note == "no run on node1"
    for lines in range(5, 100):
        hosts, runs = panes(found, lines)
        assert 0 <= hosts <= 64 and 0 <= runs <= 10 and hosts + runs <= max(0, lines - 4)


def test_what_is_selected_stays_when_hosts_and_runs_change() -> None:
    view, _ = pressed(crowd(), "tab", "down")
    more = made([seen("node1", parts=(part(0, "node1"), part(2, "node1", last="still here")))])
    (line,) = [line for line in view.tables(more, 100, 24)[:-1] if line.startswith("\x1b[7m")]
    assert "still here" in line
    assert bar(crowd(runs=0), view) == "node1", "it is gone"


def test_keys_as_terminals_send_them() -> None:
    assert decode(b"\x1b[A\x1bOA\x1b[5~\x1b[H\x1b[1~\r\t\x1b[Zj\xc3\xa9\x1a") == [
        *("up", "up", "pageup", "home", "home", "enter", "tab", "tab", "j", "é", "suspend")
    ]
    assert decode(b"\x1b[200~\x01\x1b[1;2P") == [], "unknown keys do nothing"
