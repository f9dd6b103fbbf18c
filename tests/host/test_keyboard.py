"""Ranks have no keyboard: a function that wants one gets an error that says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import skyfab as sky


def stop_here() -> None:
    breakpoint()  # noqa: T100


def ask() -> str:
    return input("name? ")


def test_breakpoint_and_input_raise_and_say_why(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool()
    with pytest.raises(RuntimeError, match="this process has no keyboard input"):
        sky.function(stop_here)() >> pool
    with pytest.raises(EOFError) as caught:
        sky.function(ask)() >> pool
    shown = "\n".join(getattr(caught.value, "__notes__", [])) + str(caught.value.__cause__)
    assert "processes on here1 have no keyboard input" in shown
    assert sky.function(len)("the pool goes on") >> pool
