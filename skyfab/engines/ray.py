"""Ray on the hosts of a pool: `compute.ray()`. The first host is its head."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from skyfab._util.sizes import counted
from skyfab.calls.call import Call
from skyfab.errors import SkyfabError, UsageError
from skyfab.host.ray_node import RayNode
from skyfab.plugins.ray import Ray
from skyfab.session.fanout import for_each_host, results_of
from skyfab.ui.events import Notice

R = TypeVar("R")

_ANY_PORTS: Final = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
"""Lets Ray choose any free port instead of its defaults."""


class RayCluster:
    """Ray on all hosts of a pool, with its own token. `compute.ray()` makes it.

    ``with compute.ray() as address:`` starts it, and ends it with the block. In the block, functions of the pool find
    `RAY_ADDRESS` and the token in their environment: ``ray.init()`` is enough.
    """

    dashboard: str | None = None
    """The address of the dashboard on this machine, while Ray runs; None if Ray was installed without it."""
    token: str = ""
    """The token that Ray and its dashboard require, while Ray runs."""

    def __init__(
        self,
        pool: Any,
        images: Any,
        addresses: Callable[[Sequence[Any]], Sequence[str]],
        options: Mapping[str, int | None],
    ) -> None:
        """`images` has the plugins of the `pool`. `addresses` finds where its hosts reach each other. `options` are
        those of ``ray start``. Raises UsageError."""
        self._pool = pool
        self._images = images
        self._addresses = addresses
        self._options = [f"--{name}={value}" for name, value in options.items() if value is not None]
        self._running = ExitStack()
        self._plugin()

    def _plugin(self) -> Ray:
        """The pool's plugin, which knows the running Ray. Raises UsageError if the pool has none."""
        for plugin in self._images.plugins:
            if isinstance(plugin, Ray):
                return plugin
        raise UsageError("this pool has no Ray", hint="Compute(…, plugins=[sky.plugins.ray()]) adds it to the image")

    def __enter__(self) -> str:
        """Starts Ray on every host; returns its address, which the hosts can use.

        Raises HostUnfit if a host has no Ray, or already runs another one of the same user; PeersUnreachable if hosts
        cannot connect to each other; UsageError if Ray already runs on this pool.
        """
        if self._plugin().head:
            raise UsageError("Ray is already running on this pool", hint="compute.ray().submit(call) uses it")
        with ExitStack() as running:
            address = self._start(running)
            self._running = running.pop_all()
        return address

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def submit(self, call: Call[R]) -> R:
        """Runs a call on the head, waits, and returns its result.

        Uses the Ray that runs on the pool. If none does, one is started for this call.
        """
        with ExitStack() as stack:
            if not self._plugin().head:
                stack.enter_context(self)
            future = self._pool.submit(call, on=self._plugin().head)
            try:
                result: R = future.result()
            except BaseException:
                future.cancel()
                raise
            return result

    def _start(self, running: ExitStack) -> str:
        nodes = [node for node in self._pool.hosts if node.lost is None] or self._pool.hosts
        self._pool.events.emit(Notice(host=nodes[0].name, text=f"starting Ray on {counted(len(nodes), 'host')}"))
        addresses = self._addresses(nodes)
        self.token = secrets.token_hex(32)
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        actors: dict[Any, Any] = {}

        @running.push
        def end(kind: type[BaseException] | None, *_: object) -> None:
            _each(functools.partial(_end, regularly=kind is None), list(actors.values()))

        def make(node: Any) -> None:
            actors[node] = self._pool.actor(RayNode, node.name, on=node.name)

        def start(node: Any, at: str, *options: str) -> tuple[str, int]:
            given = [f"--node-ip-address={at}", *_ANY_PORTS, *self._options, *options]
            address, port = actors[node].start(given, env, head=node is nodes[0])
            return str(address), int(port)

        _each(make, nodes)  # all of them first: nothing is started if one is unfit
        address, port = start(nodes[0], addresses[0])
        others = list(zip(nodes, addresses, strict=True))[1:]
        _each(lambda other: start(*other, f"--address={address}"), others)
        text = f"Ray runs at {address}"
        self.dashboard = None
        if port:
            self.dashboard = running.enter_context(self._pool.forward(port, on=nodes[0].name)).url
            text += f", its dashboard at {self.dashboard}"
        self._pool.events.emit(Notice(host=nodes[0].name, text=text))
        self._connect(nodes[0].name, {**env, "RAY_ADDRESS": address})
        running.callback(self._connect, "", {})
        return address

    def _connect(self, head: str, variables: Mapping[str, str]) -> None:
        """Sets which Ray functions connect to that are packed from now on."""
        changed = replace(self._plugin(), head=head, variables=variables)
        self._images.plugins = tuple(changed if isinstance(one, Ray) else one for one in self._images.plugins)


def _each(action: Callable[[Any], object], items: Sequence[Any]) -> None:
    results_of(for_each_host(action, items))


def _end(actor: Any, *, regularly: bool) -> None:
    with suppress(SkyfabError), actor:  # on a lost host, Ray has ended with the agent
        if regularly:  # else it may still be starting
            actor.stop()
