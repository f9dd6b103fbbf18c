"""`-v`: prints the steps that the library logs, with the seconds since the start, and all frames of tracebacks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from skyfab.ui.terminal import clean


class _Steps(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.relativeCreated / 1000:6.1f} s  {clean(record.getMessage(), colour=False)}"


@contextmanager
def shown() -> Iterator[None]:
    """Inside this context, the steps are printed to stderr."""
    trace = os.environ.get("SKYFAB_TRACE", "")
    os.environ["SKYFAB_TRACE"] = "1"
    logger, steps = logging.getLogger("skyfab"), logging.StreamHandler()
    steps.setFormatter(_Steps())
    before = logger.level
    logger.addHandler(steps)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(steps)
        os.environ["SKYFAB_TRACE"] = trace
