"""`python -m skyfab`: the same as the command `skyfab`."""

from __future__ import annotations

from skyfab.cli import main

main()
