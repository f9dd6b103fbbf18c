"""Two containers for one job, removed afterwards: python examples/containers.py [IMAGE]"""

import sys

import skyfab as sky


@sky.function
def mean(numbers):
    mine = sky.shard(numbers)
    return sky.instance_info().hostname, sum(mine) / len(mine)


if __name__ == "__main__":
    options = {"image": sys.argv[1]} if len(sys.argv) > 1 else {}
    with sky.Compute(provider=sky.Container(nodes=2, **options)) as compute:
        for name, value in mean([1, 2, 3, 4]) @ compute:
            print(name, value)
