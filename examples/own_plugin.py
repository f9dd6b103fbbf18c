"""A custom plugin that seeds every rank: python examples/own_plugin.py [node1,node2]"""

import random
import sys
from contextlib import contextmanager

import skyfab as sky


class Seeded(sky.plugins.Plugin):
    def __init__(self, seed):
        self.seed = seed

    @contextmanager
    def around_call(self, info):
        random.seed(self.seed + info.rank)
        yield


@sky.function
def draw():
    return random.randrange(1000)


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(hosts, ranks=2, plugins=[Seeded(7)]) as compute:
        first, again = draw() @ compute, draw() @ compute
        print(first == again, len(set(first)) == compute.world_size)
