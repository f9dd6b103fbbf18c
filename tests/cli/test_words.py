"""The reading of command lines: whatever is typed is understood, or is one message with what to type instead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyfab.cli import words
from skyfab.cli.tasks import COMMANDS
from skyfab.errors import UsageError

TASKS = COMMANDS
TYPED = "-- - -f -v -h --help help lab node1 x.py --hosts=node1 --ranks=2 --epochs=x --json=1 --inventory= -fv -é --= ="
PIECES = [*TASKS, *(repr(one) for task in TASKS.values() for one in task.parameters), *TYPED.split(), "", "a b"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=7))
@pytest.mark.slow
def test_whatever_is_typed_is_a_line_or_a_usage_error(typed: list[str]) -> None:
    try:
        line = words.read(typed, TASKS)
    except UsageError:
        return
    if line.task in TASKS and not line.help:
        names = {one.name for one in TASKS[line.task].parameters}
        assert set(line.values) <= names
        assert {one.name for one in TASKS[line.task].parameters if one.positional} <= set(line.values)


@pytest.mark.parametrize(
    ("typed", "task", "values", "rest"),
    [
        ("hosts node1 node[2-3] --json", "hosts", {"hosts": "node1,node[2-3]", "json_": True}, []),
        ("hosts node1 --hosts=gpu", "hosts", {"hosts": "gpu,node1"}, []),
        ("exec node1 -- ls -h", "exec", {"hosts": "node1"}, ["ls", "-h"]),
        ("exec -- ls -- -v", "exec", {}, ["ls", "--", "-v"]),
        (
            "run x.py --hosts node1 --ranks 2 -- --hosts=me",
            "run",
            {"target": "x.py", "hosts": "node1", "ranks": 2},
            ["--hosts=me"],
        ),
        ("logs night -f --rank=0", "logs", {"id_": "night", "follow": True, "rank": 0}, []),
        ("prepare --pip=a --pip b", "prepare", {"pip": ["a", "b"]}, []),
        ("runs --hosts=node1 --hosts node2", "runs", {"hosts": "node1,node2"}, []),
        ("put x --hosts=node1 --hosts=!node2", "put", {"path": "x", "hosts": "node1,!node2"}, []),
        ("trust --known-hosts=x --known-hosts=y", "trust", {"known_hosts": "y"}, []),
    ],
)
def test_lines(typed: str, task: str, values: dict[str, Any], rest: list[str]) -> None:
    line = words.read(typed.split(), TASKS)
    assert (line.task, line.values, line.rest) == (task, values, rest)


def test_hosts_after_a_scripts_words_are_not_the_scripts() -> None:
    with pytest.raises(UsageError) as caught:
        words.read(["run", "train.py", "1", "--hosts=node1", "--epochs=2"], TASKS)
    assert str(caught.value.hint).endswith("run --hosts=node1 train.py -- 1 --epochs=2")
