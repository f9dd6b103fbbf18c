"""torchrunx: a launcher that starts its agents by fabric.

Its workers connect to the launcher by this machine's host name, which a lab host resolves to itself. So the name is
replaced by the address at which the hosts reach this machine. All else is as torchrunx has it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

import cloudpickle
import torchrunx

from benchmarks.peers import gang, session, work
from benchmarks.peers.site import Site


def start(site: Site) -> None:
    socket.getfqdn = lambda name="": site.own_address
    os.environ["GLOO_SOCKET_IFNAME"] = site.own_interface
    cloudpickle.register_pickle_by_value(gang)  # the hosts do not have this checkout
    os.chdir("/")  # the workers change to the folder of the same name
    launcher = torchrunx.Launcher(
        hostnames=list(site.first(work.RANKS)),
        workers_per_host=1,
        ssh_config_file=site.config,
        backend="gloo",
        extra_env_vars={"GLOO_SOCKET_IFNAME": site.interface, "OMP_NUM_THREADS": "1"},
    )
    launcher.set_logging_handlers(_output).run(gang.main)


def _output() -> list[logging.Handler]:
    """Logging handlers that print the workers' output, and nothing else."""
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda record: getattr(record, "local_rank", None) is not None)
    return [handler]


if __name__ == "__main__":
    session.main({"gang": start})
