"""One trial of a sweep: skyfab sweep examples/trial.py lr=0.3,0.1,0.03 seed=1..4 [--hosts=node1,node2]

Fits a line to noisy points by gradient descent. What it reports is in the table of the sweep. Alone it is a plain
program: python examples/trial.py lr=0.1 seed=1
"""

import random
import sys

import skyfab as sky

STEPS = 60

if __name__ == "__main__":
    given = {"lr": "0.1", "seed": "1"} | dict(word.split("=") for word in sys.argv[1:] if "=" in word)
    lr, chance = float(given["lr"]), random.Random(int(given["seed"]))
    points = [(x / 50, 3 * x / 50 + 1 + chance.gauss(0, 0.1)) for x in range(50)]
    slope = offset = 0.0
    for step in range(1, STEPS + 1):
        errors = [(slope * x + offset - y, x) for x, y in points]
        slope -= lr * 2 * sum(error * x for error, x in errors) / len(points)
        offset -= lr * 2 * sum(error for error, _ in errors) / len(points)
        loss = sum(error * error for error, _ in errors) / len(points)
        sky.report(loss=loss, step=step)  # the last values count
    print(f"loss {loss:.4f}: y = {slope:.2f} x + {offset:.2f}")
