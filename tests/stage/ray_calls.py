"""Functions that use a running Ray, in a module that hosts and Ray's own processes can import."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from typing import Any

import skyfab as sky

MARK = "a module of the project"


@sky.function
def spread(nodes: int) -> tuple[set[str], list[int], str]:
    """Waits for that number of nodes. Those that tasks ran on, what an actor counted, what a task found here."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False)
    while len(alive := [node["NodeID"] for node in ray.nodes() if node["Alive"]]) != nodes:
        time.sleep(0.2)

    @ray.remote
    def where() -> tuple[str, str]:
        return ray.util.get_node_ip_address(), importlib.import_module("stage.ray_calls").MARK

    class Counter:
        count = 0

        def add(self) -> int:
            self.count += 1
            return self.count

    counter: Any = ray.remote(num_cpus=0)(Counter).remote()
    pinned = [where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in alive]
    found = ray.get([one.remote() for one in pinned])
    return {address for address, _ in found}, ray.get([counter.add.remote() for _ in range(3)]), found[0][1]


@sky.function
def host_and_address() -> tuple[int, str | None]:
    return sky.instance_info().node, os.environ.get("RAY_ADDRESS")


@sky.function
def connect() -> str:
    """What a process there prints that connects with another token."""
    text = "import ray; ray.init(); print('connected')"
    environ = os.environ | {"RAY_AUTH_TOKEN": "0" * 64}
    argv = ["timeout", "20", sys.executable, "-c", text]
    done = subprocess.run(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout
