"""The options of a run on GPUs that nobody else uses."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from skyfab._util.sizes import counted
from skyfab.cli.command import Option
from skyfab.errors import UsageError

if TYPE_CHECKING:
    from skyfab.calls.call import Call
    from skyfab.cli.script_options import ScriptOptions
    from skyfab.pool.compute import Compute


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """The values of these options."""

    gpus: Annotated[int | None, Option("take N GPUs that nobody else uses, on each host", "N")] = None
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
            raise UsageError("--priority needs --when-free or --gpus", hint="to wait for all GPUs: --when-free")
        return self.when_free or self.gpus is not None

    def added_to(self, options: ScriptOptions) -> ScriptOptions:
        """With the variable that keeps its ranks from noting all GPUs as in use."""
        from skyfab.host.gpu_locks import QUEUED

        return replace(options, env=(*options.env, f"{QUEUED}=claimed")) if self.claims else options

    def supervised(
        self, call: Call[Any], compute: Compute, name: str, server: dict[str, Any] | None = None
    ) -> Call[Any]:
        """A call that runs the same program, but first takes GPUs, or restarts it as a `server`.

        Raises UsageError if a host has too few GPUs.
        """
        from skyfab.calls.call import as_function
        from skyfab.host.command import execute
        from skyfab.host.supervise import supervise

        few = {node.name: len(node.gpus) for node in compute.hosts if len(node.gpus) < (self.gpus or 1)}
        if self.claims and few:
            has = ", ".join(f"{host} has {counted(count, 'GPU')}" for host, count in few.items())
            typed = "--when-free" if self.gpus is None else f"--gpus={self.gpus}"
            raise UsageError(f"{typed}: {has}", hint="choose other hosts, or fewer GPUs")
        is_low = self.priority == "low"
        is_command = call.function.fn is execute
        settings = {
            "gpus": {"count": self.gpus, "wait": self.when_free or is_low, "low": is_low} if self.claims else None,
            "server": server,
            "run": name,
            "script": None if is_command else json.dumps(call.args),
            "secret": secrets.token_hex(32),
        }
        supervised = as_function(supervise)
        supervised.label = call.function.label
        return supervised(*(call.args if is_command else ([], None)), settings)
