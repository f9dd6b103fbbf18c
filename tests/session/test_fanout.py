"""What comes of the same action on several hosts: results in order, or one error."""

from __future__ import annotations

import threading

import pytest

from skyfab.errors import PoolError, Unreachable, UsageError
from skyfab.session.fanout import Raised, for_each_host, meanwhile, one_error


def test_results_and_errors_are_in_the_order_of_the_hosts() -> None:
    one, error, two = for_each_host(lambda number: 10 // number, [1, 0, 5])
    assert (one, two) == (10, 2)
    assert isinstance(error, Raised)
    assert isinstance(error.error, ZeroDivisionError)


@pytest.mark.parametrize("allowed", [0, 2])
def test_what_threads_that_cannot_be_started_would_do_is_done(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    """As on a machine without further threads, and when Python exits."""
    start, left = threading.Thread.start, [None] * allowed

    def begin(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    assert for_each_host(lambda number: number * 2, range(5)) == [0, 2, 4, 6, 8]
    with pytest.raises(RuntimeError):
        for_each_host(lambda number: number, range(5), most=5)  # their actions would wait for each other


def down(host: str) -> Unreachable:
    return Unreachable("no route", host=host)


def test_several_failures_are_one_error() -> None:
    errors = [down("a"), down("b")]
    raised = one_error(errors, 3)
    assert isinstance(raised, PoolError)
    assert raised.message == "2 of 3 hosts failed"
    assert list(raised.exceptions) == errors


def test_a_mistake_that_is_the_same_on_all_hosts_is_said_once_and_of_none() -> None:
    errors = [UsageError("no such package", host=host, hint="look") for host in "ab"]
    raised = one_error(errors, 2)
    assert raised is errors[0]
    assert str(raised) == "no such package\nhint: look"


def test_a_mistake_with_another_hint_for_each_host_is_said_for_each() -> None:
    errors = [UsageError("it has a key", host=host, hint=f"change [hosts.{host}]") for host in "ab"]
    assert isinstance(one_error(errors, 2), PoolError)


def test_a_bug_is_not_hidden_among_failures_of_hosts() -> None:
    bug = KeyError("x")
    assert one_error([down("a"), bug], 2) is bug


def test_threads_keep_no_program_from_ending_and_a_block_waits_for_its_own() -> None:
    daemons = for_each_host(lambda _: threading.current_thread().daemon, [1, 2])
    go = threading.Event()

    def action() -> None:
        assert go.wait(30)
        daemons.append(threading.current_thread().daemon)

    with meanwhile(action):
        go.set()
    assert daemons == [True] * 3
