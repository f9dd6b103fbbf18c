"""Runs torchrunx in a process: ``python -m benchmarks.launcher SSH_CONFIG HOST…`` waits for a line, then launches.

torchrunx's workers connect to the launcher by this machine's host name, which a lab host resolves to itself. So the
name is replaced by the address at which the lab's hosts reach this machine. All else is as torchrunx has it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

from benchmarks import training
from skyfab.host.agent.host_info import addresses

READY = "ready"
ENV = "BENCH_ENV_"
"""Prefix of environment variables that are passed on to the workers."""


def main(config: str, *hosts: str) -> None:
    """Prints READY when torchrunx is imported. The measured time begins with the line that it then reads."""
    _be_found_from(hosts[0])
    import cloudpickle
    import torchrunx

    cloudpickle.register_pickle_by_value(training)  # the hosts do not have this checkout
    os.chdir("/")  # the workers change to the folder of the same name
    launcher = torchrunx.Launcher(
        hostnames=list(hosts),
        workers_per_host=1,
        ssh_config_file=config,
        backend="gloo",
        extra_env_vars={key.removeprefix(ENV): value for key, value in os.environ.items() if key.startswith(ENV)},
    ).set_logging_handlers(_words)
    print(READY, flush=True)
    sys.stdin.readline()
    launcher.run(training.first)


def _be_found_from(host: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address = str(probe.getsockname()[0])
    socket.getfqdn = lambda name="": address
    names = [name for name, told in addresses() if told.partition("/")[0] == address]
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _words() -> list[logging.Handler]:
    """Logging handlers that print the workers' output, and nothing else."""
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda record: getattr(record, "local_rank", None) is not None)
    return [handler]


if __name__ == "__main__":
    main(*sys.argv[1:])
