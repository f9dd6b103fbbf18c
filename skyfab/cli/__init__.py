"""The command line program `skyfab`: its tasks are declared in tasks.py; each command has a module of its own."""

from __future__ import annotations

from skyfab.cli.tasks import main as main
from skyfab.cli.tasks import namespace as namespace
