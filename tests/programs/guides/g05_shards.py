import random

import skyfab as sky


@sky.function
def mean_of_shard(points: list, labels: list) -> dict:
    import numpy as np

    mine, mine_labels = sky.shard(points, labels, shuffle=True, seed=3)
    assert all(point[0] == label for point, label in zip(mine, mine_labels))  # still in pairs
    return {"node": sky.instance_info().node, "size": len(mine), "sum": float(np.array(mine).sum())}


@sky.function
def types() -> list[str]:
    import numpy as np

    return [type(sky.shard(values)).__name__ for values in ([1, 2], (1, 2), np.arange(2))]


if __name__ == "__main__":
    labels = [random.randint(0, 9) for _ in range(101)]
    points = [[label, 0.5] for label in labels]
    with sky.Compute("node1,node2", image=sky.Image(pip=["numpy"])) as compute:
        parts = mean_of_shard(points, labels) @ compute
        print("sizes:", [part["size"] for part in parts])
        print("complete:", sum(part["sum"] for part in parts) == sum(labels) + 0.5 * len(labels))
        print("types:", types() @ compute)
