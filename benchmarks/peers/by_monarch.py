"""Monarch: its worker loop on each host, started by ssh, and an actor on each. Its connections are plain TCP."""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint
from monarch.spmd import setup_torch_elastic_env

from benchmarks.peers import session, work
from benchmarks.peers.site import Site

_PORT = 26600
_LOOP = "from monarch.actor import run_worker_loop_forever as run; run(address={!r}, ca='trust_all_connections')"


class Worker(Actor):
    """Its methods have the functions' text: the hosts do not have this checkout."""

    @endpoint
    def add_one(self, number: int) -> int:
        return number + 1

    @endpoint
    def square(self, number: int) -> int:
        return number * number

    @endpoint
    def hostname(self) -> str:
        return socket.gethostname()

    @endpoint
    def reverse(self, array: Any) -> Any:
        return array[::-1].copy()


@contextmanager
def _hosts(site: Site, addresses: Sequence[str]) -> Iterator[Any]:
    urls = [f"tcp://{address}:{_PORT}" for address in addresses]
    running = []
    try:
        for address, url in zip(addresses, urls, strict=True):
            # It ends with its input, and so with this program.
            loop = f"{shlex.join([site.python, '-c', _LOOP.format(url)])} & cat >/dev/null; kill $!"
            argv = ["ssh", "-F", site.config, address, loop]
            running.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        enable_transport(f"tcp://{site.own_address}:{_PORT}")  # where the hosts reach this program
        mesh = attach_to_workers(ca="trust_all_connections", workers=urls)
        mesh.initialized.get()
        yield mesh
    finally:
        for process in running:
            assert process.stdin
            process.stdin.close()
        for process in running:
            process.wait()


@contextmanager
def warm(site: Site) -> Iterator[session.Warm]:
    with _hosts(site, site.first(work.HOSTS)) as hosts:
        workers = hosts.spawn_procs(per_host={"procs": 1}).spawn("worker", Worker)
        each = [workers.slice(hosts=place, procs=0) for place in range(work.HOSTS)]

        def squares(numbers: range) -> list[int]:
            """In turns, all of them sent before the first answer is read."""
            answers = [each[number % len(each)].square.call_one(number) for number in numbers]
            return [answer.get() for answer in answers]

        yield session.warm(
            site,
            call=lambda number: each[0].add_one.call_one(number).get(),
            everywhere=lambda: [name for _, name in workers.hostname.call().get()],
            squares=squares,
            reverse=lambda array: each[0].reverse.call_one(array).get(),
        )


def gang(site: Site) -> None:
    """As the script `gang`. Ranks import torch when they get the class: within an endpoint, that fails."""
    import torch
    import torch.distributed as dist

    class Rank(Actor):
        @endpoint
        def join(self, interface: str) -> str:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            dist.init_process_group("gloo")
            total = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(total)
            dist.destroy_process_group()
            return f"sum {total.item()}"

    with _hosts(site, site.first(work.RANKS)) as hosts:
        procs = hosts.spawn_procs(per_host={"gpus": 1})
        setup_torch_elastic_env(procs)
        print("\n".join(text for _, text in procs.spawn("rank", Rank).join.call(site.interface).get()))


if __name__ == "__main__":
    session.main({"gang": gang}, warm)
