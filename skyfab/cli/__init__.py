"""The command line: one file a command."""

from __future__ import annotations

from skyfab.cli.tasks import main as main
from skyfab.cli.tasks import namespace as namespace
