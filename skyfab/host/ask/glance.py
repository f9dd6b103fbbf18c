"""What `skyfab top` asks a host each time: its survey and its runs. `glance` runs there, in a worker."""

from __future__ import annotations

import json

from skyfab.host.ask.runs import look_at_runs
from skyfab.host.ask.survey import look


def glance(cache: str) -> str:
    """What there is to say about this host now, and about the runs in `cache`, as JSON."""
    return json.dumps([look(cache), look_at_runs(cache)])
