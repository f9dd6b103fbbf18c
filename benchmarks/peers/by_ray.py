"""Ray: ``ray start`` on each host by ssh, and a client here (``ray://``). Its connections are plain TCP."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.peers import session, work
from benchmarks.peers.site import Site

_PORT, _CLIENTS = 6379, 10001
_PATIENT = "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S=60"
"""For its server of clients, which gives up after 30 s: too soon on a busy machine."""
_START = ["--num-cpus=1", f"--object-store-memory={1 << 30}", "--disable-usage-stats"]
_HEAD = ["--head", f"--port={_PORT}", f"--ray-client-server-port={_CLIENTS}", "--include-dashboard=false"]


# Functions of the program itself are sent by value; the hosts do not have this checkout.


def add_one(number: int) -> int:
    return number + 1


def square(number: int) -> int:
    return number * number


def hostname() -> str:
    import socket

    return socket.gethostname()


def reverse(array: Any) -> Any:
    return array[::-1].copy()


@contextmanager
def warm(site: Site) -> Iterator[session.Warm]:
    addresses = site.first(work.HOSTS)
    try:
        _each(site, addresses[:1], ["start", *_HEAD, *_START], name=True)
        _each(site, addresses[1:], ["start", f"--address={addresses[0]}:{_PORT}", *_START], name=True)
        ray.init(f"ray://{addresses[0]}:{_CLIENTS}", log_to_driver=False)
        yield _jobs(site)
        ray.shutdown()
    finally:
        _each(site, addresses, ["stop", "--force"])


def _jobs(site: Site) -> session.Warm:
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
    on = [{"scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[each], soft=False)} for each in nodes]
    head = on[list(nodes).index(site.addresses[0])]
    call = ray.remote(add_one).options(**head)
    hostnames = [ray.remote(hostname).options(**each) for each in on]
    squared = ray.remote(square)
    reversed_ = ray.remote(reverse).options(**head)
    return session.warm(
        site,
        call=lambda number: ray.get(call.remote(number)),
        everywhere=lambda: ray.get([each.remote() for each in hostnames]),
        squares=lambda numbers: ray.get([squared.remote(number) for number in numbers]),
        reverse=lambda array: ray.get(reversed_.remote(array)),
    )


def _each(site: Site, addresses: Sequence[str], words: Sequence[str], *, name: bool = False) -> None:
    """Runs a command of Ray's on hosts, each by its own ssh. Raises CalledProcessError if it fails."""
    running = []
    for address in addresses:
        own = [f"--node-ip-address={address}"] if name else []
        command = shlex.join(["env", _PATIENT, site.python, "-m", "ray.scripts.scripts", *words, *own])
        argv = ["ssh", "-F", site.config, address, f"{command} >/dev/null 2>&1 </dev/null"]
        running.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL))
    for process in running:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)


if __name__ == "__main__":
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    session.main({}, warm)
