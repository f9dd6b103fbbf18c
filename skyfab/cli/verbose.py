"""`-v`: prints the steps that the library logs, with the seconds since the start, and all frames of tracebacks."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from skyfab.ui.terminal import clean


class _Steps(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._began = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        # A single write, since several threads may do so at the same time.
        text = clean(record.getMessage(), colour=False)
        sys.stderr.write(f"{time.monotonic() - self._began:6.1f} s  {text}\n")


@contextmanager
def shown() -> Iterator[None]:
    """Inside this context, the steps are printed to stderr."""
    trace = os.environ.get("SKYFAB_TRACE", "")
    os.environ["SKYFAB_TRACE"] = "1"
    logger, steps = logging.getLogger("skyfab"), _Steps()
    before = logger.level
    logger.addHandler(steps)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(steps)
        os.environ["SKYFAB_TRACE"] = trace
