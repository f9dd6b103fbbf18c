import skyfab as sky


@sky.function
def power(base: int, exponent: int) -> int:
    return base**exponent


@sky.function
def describe(values: list[float]) -> dict:
    return {"least": min(values), "most": max(values), "mean": sum(values) / len(values)}


if __name__ == "__main__":
    with sky.Compute("node1") as compute:
        print("power:", power(2, exponent=10) >> compute)
        print("values:", describe([1.0, 2.0, 6.0]) >> compute)
