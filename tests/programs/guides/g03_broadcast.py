import skyfab as sky


@sky.function
def sum_part(values: list[int]) -> dict:
    info = sky.instance_info()
    mine = sky.shard(values)
    return {"node": info.node, "count": len(mine), "sum": sum(mine)}


if __name__ == "__main__":
    values = list(range(100))
    with sky.Compute("lab", nodes=4) as compute:
        parts = sum_part(values) @ compute
    for part in parts:
        print(f"node {part['node']}: {part['count']} values")
    print("all:", sum(part["sum"] for part in parts), "of", sum(values))
