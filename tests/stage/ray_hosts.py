"""What tests of Ray start on hosts, and what it may leave there."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest

from skyfab.lab import Lab, LabHost

SMALL = {"num_cpus": 1, "object_store_memory": 100 * 1024 * 1024}
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray")


def of_ray(host: LabHost) -> list[Any]:
    """The processes of Ray on a host."""
    found = [(process, " ".join(process.cmdline)) for process in host.processes()]
    return [process for process, words in found if "ray/" in words or "ray::" in words or "ray.scripts" in words]


def assert_nothing_is_left(lab: Lab) -> None:
    """The folders go after the processes, which a busy machine may not do at once."""

    def folders(host: LabHost) -> list[Any]:
        return list(host.path("/home/ada/.cache/skyfab/run").glob("*/*/*/ray-*"))

    deadline = time.monotonic() + 30
    while any(of_ray(host) or folders(host) for host in lab.hosts) and time.monotonic() < deadline:
        time.sleep(0.1)
    for host in lab.hosts:
        assert not of_ray(host)
        found = host.run(["find", "/tmp", "/dev/shm", "/home/ada/.ray", "/root/.ray", "-iname", "*ray*"], check=False)
        assert not found.stdout
        assert not folders(host)
