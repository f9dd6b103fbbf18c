import asyncio
import skyfab as sky


@sky.function
def f(x):
    print("f", x)
    return x + 1


@sky.function
def g(x):
    return x * 10


@sky.function
def square(x):
    return x * x


@sky.function
def bad(x):
    return {}[x]


if __name__ == "__main__":
    with sky.Compute("all") as compute:
        print(f(1) >> compute, f(1) @ compute)
        fut = f(5) > compute
        print(fut.result())
        a, b = (f(1) & g(2)) >> compute
        print(a, b, sum(compute.map(square, range(1000))))
        try:
            bad(3) >> compute
        except KeyError as e:
            print("caught", e)
        f(2)
        bad(4) >> compute
