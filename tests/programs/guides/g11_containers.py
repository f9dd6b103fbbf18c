import skyfab as sky


@sky.function
def name() -> str:
    import socket

    return socket.gethostname()


@sky.function
def variable() -> str | None:
    import os

    return os.environ.get("GREETING")


@sky.function
def place() -> tuple[int, int, bool]:
    info = sky.instance_info()
    return info.node, info.total_nodes, info.is_head


@sky.function
def sum_part(values: list[int]) -> int:
    return sum(sky.shard(values))


if __name__ == "__main__":
    with sky.Compute("lab", nodes=1) as compute:
        print(name() >> compute)
    with sky.Compute("lab", nodes=1, image=sky.Image(env={"GREETING": "good morning"})) as compute:
        print(variable() >> compute)
    with sky.Compute("lab", nodes=3) as compute:
        print(place() @ compute)
        print(sum(sum_part(list(range(50))) @ compute))
