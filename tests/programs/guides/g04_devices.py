import skyfab as sky


@sky.function
def about() -> sky.InstanceInfo:
    return sky.instance_info()


@sky.function
def multiply(size: int) -> dict:
    import time

    import torch

    matrix = torch.randn(size, size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    product = matrix.to(device) @ matrix.to(device)
    return {"device": device, "seconds": time.perf_counter() - began, "shape": tuple(product.shape)}


if __name__ == "__main__":
    with sky.Compute("node1", image=sky.Image(pip=["torch", "numpy"])) as compute:
        info = about() >> compute
        print(f"{info.hostname}: node {info.node} of {info.total_nodes}, GPUs: {info.accelerators}")
        print((multiply(64) >> compute)["shape"])
