"""Ranks have no keyboard: a function that wants one gets an error that says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import skyfab as sky


def stop_here() -> None:
    breakpoint()  # noqa: T100


def ask() -> str:
    return input("name? ")


def test_breakpoint_raises_and_says_why(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool()
    with pytest.raises(RuntimeError, match="this process has no keyboard input"):
        sky.function(stop_here)() >> pool
    assert sky.function(len)("the pool goes on") >> pool


def test_breakpoint_can_be_turned_off_as_everywhere(open_pool: Callable[..., sky.Compute]) -> None:
    assert sky.function(stop_here)() >> open_pool(env={"PYTHONBREAKPOINT": "0"}) is None


def test_input_finds_an_end_and_says_why(open_pool: Callable[..., sky.Compute]) -> None:
    with pytest.raises(EOFError) as caught:
        sky.function(ask)() >> open_pool()
    shown = "\n".join(getattr(caught.value, "__notes__", [])) + str(caught.value.__cause__)
    assert "processes on here1 have no keyboard input" in shown
