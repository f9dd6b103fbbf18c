"""The parsing of command lines: whatever is typed is understood, or is one message with what to type instead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyfab.cli.parser import CommandLine, CommandParser
from skyfab.cli.tasks import COMMANDS
from skyfab.errors import UsageError

LINE = CommandLine(COMMANDS)
TYPED = "-- - -f -v -V lab node1 x.py --hosts=node1 --ranks=2 --epochs=x --json=1 --inventory= -fv -é --= ="
FLAGS = [flag for one in COMMANDS.values() for action in CommandParser(one).actions for flag in action.option_strings]
PIECES = [*COMMANDS, *FLAGS, *TYPED.split(), "", "a b"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=6), min_size=1, max_size=7))
@pytest.mark.slow
def test_whatever_is_typed_is_a_line_or_a_usage_error(typed: list[str]) -> None:
    try:
        line = LINE.parse(typed)
    except UsageError:
        return
    except SystemExit:  # after help
        return
    if line.command:
        parameters = COMMANDS[line.command].parameters
        assert set(line.values) <= {one.name for one in parameters}
        assert {one.name for one in parameters if one.positional} <= set(line.values)


@pytest.mark.parametrize(
    ("typed", "command", "values", "rest"),
    [
        ("hosts node1 node[2-3] --json", "hosts", {"hosts": "node1,node[2-3]", "json_": True}, []),
        ("hosts node1 --json node2", "hosts", {"hosts": "node1,node2", "json_": True}, []),
        ("hosts node1 --hosts=gpu", "hosts", {"hosts": "gpu,node1"}, []),
        ("exec node1 -- ls -h", "exec", {"hosts": "node1"}, ["ls", "-h"]),
        ("exec -- ls -- -v", "exec", {}, ["ls", "--", "-v"]),
        ("ssh node1 --run=night -- ls -l", "ssh", {"host": "node1", "run": "night"}, ["ls", "-l"]),
        ("logs night -f --rank=0", "logs", {"id_": "night", "follow": True, "rank": 0}, []),
        ("prepare --pip=a --pip b", "prepare", {"pip": ["a", "b"]}, []),
        ("runs --hosts=node1 --hosts node2", "runs", {"hosts": "node1,node2"}, []),
        ("put x --hosts=node1 --hosts=!node2", "put", {"path": "x", "hosts": "node1,!node2"}, []),
        ("get a b, --to=c --run=night d", "get", {"path": ["a", "b,", "d"], "to": "c", "run": "night"}, []),
        ("stop --all --yes", "stop", {"all_": True, "yes": True}, []),
        ("run --sync=all x.py --sync", "run", {"sync": "all", "target": "x.py"}, ["--sync"]),
        ("run --sync x.py", "run", {"sync": True, "target": "x.py"}, []),
        ("trust --known-hosts=x --known-hosts=y", "trust", {"known_hosts": "y"}, []),
    ],
)
def test_lines(typed: str, command: str, values: dict[str, Any], rest: list[str]) -> None:
    line = LINE.parse(typed.split())
    assert (line.command, line.values, list(line.rest)) == (command, values, rest)


@pytest.mark.parametrize(
    ("typed", "rest"),
    [
        ("x.py", []),
        ("x.py --epochs 3", ["--epochs", "3"]),
        ("x.py -- --epochs 3", ["--epochs", "3"]),
        ("x.py a -- --hosts=me -v", ["a", "--", "--hosts=me", "-v"]),
        ("x.py --hosts=me --help", ["--hosts=me", "--help"]),
    ],
)
def test_what_follows_a_script_is_the_scripts(typed: str, rest: list[str]) -> None:
    line = LINE.parse(["-v", "run", "--hosts", "node1", "--ranks=2", *typed.split()])
    assert line.verbose
    assert line.values == {"target": "x.py", "hosts": "node1", "ranks": 2}
    assert list(line.rest) == rest
