"""The options of a run on GPUs that nobody else uses."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from skyfab._util.sizes import counted
from skyfab.cli.command import Option
from skyfab.errors import UsageError

if TYPE_CHECKING:
    from skyfab.calls.call import Call
    from skyfab.cli.script_options import ScriptOptions
    from skyfab.plugins.base import Plugin
    from skyfab.pool.compute import Compute


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """The values of these options."""

    gpus: Annotated[
        int | None,
        Option("take N GPUs of each host that nobody else uses, with a rank for each", "N"),
    ] = None
    when_free: Annotated[bool, Option("wait until the GPUs are free, first come first served")] = False
    priority: Annotated[
        str,
        Option(
            "low: wait for GPUs, and give way to runs of normal priority: the program gets SIGTERM, has 30 s for a "
            "checkpoint, and waits again",
            "P",
        ),
    ] = "normal"

    @property
    def claims(self) -> bool:
        """Whether the run takes GPUs for itself. Raises UsageError."""
        if self.priority not in ("normal", "low"):
            raise UsageError(f"invalid --priority={self.priority}", hint="expected normal or low")
        if self.priority == "low" and not (self.when_free or self.gpus):
            raise UsageError("--priority needs --when-free or --gpus", hint="skyfab run --when-free --priority=low …")
        return self.when_free or self.gpus is not None

    @property
    def plugins(self) -> Sequence[Plugin]:
        """Those that such a run needs."""
        from skyfab.plugins.base import OwnPort

        return [OwnPort()] if self.claims else []

    def added_to(self, options: ScriptOptions) -> ScriptOptions:
        """With the variable that keeps its ranks from noting all GPUs as in use."""
        from skyfab.host.gpu_locks import QUEUED

        return replace(options, env=(*options.env, f"{QUEUED}=claimed")) if self.claims else options

    def call(self, call: Call[Any], compute: Compute, name: str) -> Call[Any]:
        """A call that first takes GPUs, and then runs the same program. Raises UsageError if a host has too few."""
        from skyfab.calls.call import as_function
        from skyfab.host.command import execute as plain
        from skyfab.host.gpu_queue import execute

        few = {node.name: len(node.gpus) for node in compute.hosts if len(node.gpus) < (self.gpus or 1)}
        if few:
            has = ", ".join(f"{host} has {counted(count, 'GPU')}" for host, count in few.items())
            raise UsageError(f"--gpus={self.gpus or 1}: {has}", hint="choose other hosts, or fewer GPUs")
        policy: dict[str, Any] = {
            "count": self.gpus,
            "wait": self.when_free or self.priority == "low",
            "low": self.priority == "low",
            "run": name,
            "secret": secrets.token_hex(32),
        }
        is_command = call.function.fn is plain
        if not is_command:
            policy["script"] = json.dumps(call.args)
        queued = as_function(execute)
        queued.label = call.function.label
        return queued(*(call.args if is_command else ([], None)), policy)
