import random


def inside(count, seed):
    """How many of the points lie in a quarter of a circle."""
    rng = random.Random(seed)
    return sum(rng.random() ** 2 + rng.random() ** 2 < 1 for _ in range(count))
