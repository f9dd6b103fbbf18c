"""Checks the options of `Compute`."""

from __future__ import annotations

from skyfab.errors import UsageError


def check_options(*, ranks: int | str, lease: float, heartbeat_timeout: float, results: str) -> None:
    """Raises UsageError for options that no pool can have."""
    if isinstance(ranks, int) and ranks < 1:
        raise UsageError(f"ranks={ranks!r}: a number from 1 on, or 'auto'")
    if not lease >= 1 or not heartbeat_timeout > 0:
        raise UsageError(f"lease={lease!r}, heartbeat_timeout={heartbeat_timeout!r}: a second at least, more than 0")
    if results not in ("any", "data"):
        raise UsageError(f"results={results!r}: 'any', or 'data' where hosts are not trusted")
