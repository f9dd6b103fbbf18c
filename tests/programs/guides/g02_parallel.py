import skyfab as sky


@sky.function
def total(values: list[int]) -> int:
    return sum(values)


@sky.function
def join(*words: str) -> str:
    return "-".join(words)


if __name__ == "__main__":
    with sky.Compute("node1") as compute:
        print("gathered:", sky.gather(*[total([n, n + 1]) for n in range(4)]) >> compute)
        number, text = (total([1, 2]) & join("a", "b")) >> compute
        print("two:", number, text)
        first, second, third = (total([7]) & join("c") & total([])) >> compute
        print("three:", first, second, third)
        for result in sky.gather(*[total([n] * 100) for n in range(5)], stream=True) >> compute:
            print("streamed:", result)
