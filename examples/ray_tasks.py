"""Ray on the hosts of a pool, for as long as a block: python examples/ray_tasks.py [node1,node2]

Ray's tasks, actors and libraries work as on any Ray cluster. At the end of the block, Ray is stopped on all hosts.
Hosts get Ray from the plugin; without an argument, on this machine: uv pip install ray
"""

import random
import sys

import skyfab as sky


@sky.function
def estimate(tasks, points):
    import ray

    ray.init(log_to_driver=False)  # RAY_ADDRESS and the token are set

    @ray.remote
    def count(seed):
        draw = random.Random(seed).random
        return sum(draw() ** 2 + draw() ** 2 < 1 for _ in range(points))

    hits = ray.get([count.remote(seed) for seed in range(tasks)])
    return len(ray.nodes()), 4 * sum(hits) / (tasks * points)


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(hosts, plugins=[sky.plugins.ray()]) as compute, compute.ray(num_cpus=2) as address:
        nodes, pi = estimate(tasks=8, points=20_000) >> compute
        print(f"{nodes} {'node' if nodes == 1 else 'nodes'} at {address}: {pi:.1f}")
