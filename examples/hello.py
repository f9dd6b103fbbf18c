"""A function that runs on hosts: python examples/hello.py [node1,node2]"""

import sys

import skyfab as sky


@sky.function
def mean(numbers):
    mine = sky.shard(numbers)
    print(f"numbers: {len(mine)}")
    return sum(mine) / len(mine)


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(hosts, ranks=2) as compute:
        print(mean([1, 2, 3, 4]) >> compute)  # one call: all of the numbers
        print(mean([1, 2, 3, 4]) @ compute)  # every rank: its share of them
