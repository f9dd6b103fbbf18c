"""Generators that run on a host: the worker requests their values between other instructions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Final

import torch

_FIRST, _LATER, _MOST = 0.01, 0.04, 64
"""Values in one reply: as many as a generator yields in that many seconds, but at least one. Replies cost it time: the
first one is early, and each takes twice as long as the one before, up to a limit."""
_AUTOCAST: Final = ("cpu", "cuda")


@contextlib.contextmanager
def own_defaults() -> Iterator[None]:
    """What a function sets as the default dtype holds until it ends."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class RunningGenerator:
    """A generator, with what it has set for its thread: no_grad, inference mode, autocast, the default dtype.

    It finds that again when it continues, and what the worker executes meanwhile does not.
    """

    def __init__(self, generator: Generator[Any, Any, Any], given: Mapping[int, torch.Tensor]) -> None:
        self._generator = generator
        self.given = given
        """The program's tensors that its function was called with, by id."""
        self._error: Exception | SystemExit | None = None
        self._moment = _FIRST
        self._grad, self._inference, self._autocast = True, False, _autocast()
        self._dtype = torch.get_default_dtype()

    def next(self) -> tuple[list[Any], bool]:
        """What it yields in the next moments, and whether it is over. Raises what it raised, after the values."""
        values: list[Any] = []
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        until = time.monotonic() + self._moment
        self._moment = min(2 * self._moment, _LATER)
        with self._modes():
            while len(values) < _MOST and not (values and time.monotonic() >= until):
                try:
                    values.append(next(self._generator))
                except StopIteration:
                    return values, True
                except (Exception, SystemExit) as error:
                    if not values:
                        raise
                    self._error = error
                    break
        return values, False

    def close(self) -> None:
        """Ends it where it is."""
        with self._modes():
            self._generator.close()

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        outside = _autocast()
        try:
            with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), own_defaults():
                _set_autocast(self._autocast)
                torch.set_default_dtype(self._dtype)
                try:
                    yield
                finally:
                    self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
                    self._autocast, self._dtype = _autocast(), torch.get_default_dtype()
        finally:
            _set_autocast(outside)


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST]


def _set_autocast(state: list[tuple[bool, torch.dtype]]) -> None:
    for kind, (enabled, dtype) in zip(_AUTOCAST, state, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
