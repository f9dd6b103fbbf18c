"""One function on every rank, each with its share of the data: python examples/broadcast_shard.py [node1,node2]"""

import sys

import skyfab as sky


@sky.function
@sky.stdout(only="head")  # all ranks print the same; one line is enough
def count(words, weights):
    info = sky.instance_info()
    print(f"{len(words)} words for {info.world_size} ranks")
    words, weights = sky.shard(words, weights, shuffle=True, seed=1)  # the same order in both, on all ranks
    return info.rank, len(words), sum(weights)


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    weights = [len(word) for word in words]
    with sky.Compute(hosts, ranks=2) as compute:
        shares = count(words, weights) @ compute  # a list in rank order
    for rank, number, weight in shares:
        print(f"rank {rank}: {number} words, {weight} letters")
    print(f"all: {sum(number for _, number, _ in shares)} words, {sum(weight for _, _, weight in shares)} letters")
