"""A function here, its calls elsewhere: python examples/hello.py"""

import skyfab as sky


@sky.function
def mean(numbers):
    mine = sky.shard(numbers)
    print(f"{len(mine)} numbers for me")
    return sum(mine) / len(mine)


if __name__ == "__main__":
    with sky.Compute("local", ranks=2) as compute:  # or "node1,node2", over SSH
        print(mean([1, 2, 3, 4]) >> compute)  # one call: all of the numbers
        print(mean([1, 2, 3, 4]) @ compute)  # every rank: its share of them
