"""A model in parts (FSDP2): python examples/training/fsdp.py [--hosts=node1,node2]

No rank holds the whole model or its optimizer's state: `fully_shard` keeps a part of each layer on every rank, and
gathers a layer while it is used. It runs on CPUs with gloo and on GPUs with NCCL.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import skyfab as sky
from skyfab.demo import digits


@sky.function
def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> tuple[dict[str, Tensor], list[float], int]:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (sky.instance_info().world_size,))
    for layer in [*model.layers, model]:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    x, y = (part.to(device) for part in sky.shard(x, y, shuffle=True, drop_last=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = sum(weights.to_local().numel() for weights in model.parameters())
    print(f"holds {held} weights, loss {losses[0]:.2f} → {losses[-1]:.2f}")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=whole), losses, held


def main(hosts: str) -> None:
    data = digits.load()
    torch.manual_seed(0)
    model = digits.Classifier(hidden=(128, 128))
    ranks = 2 if hosts == "local" else "auto"
    with sky.Compute(hosts, ranks=ranks, plugins=[sky.plugins.torch()]) as compute:
        results = train(model, data.x_train, data.y_train, steps=40) @ compute
    parts = [held for _, _, held in results]
    print(f"{' + '.join(map(str, parts))} of {sum(weights.numel() for weights in model.parameters())} weights")
    model.load_state_dict(results[0][0])  # the first rank has gathered it
    print(f"{digits.evaluate(model, data.x_test, data.y_test):.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="the hosts to train on (default: two ranks on this machine)")
    main(parser.parse_args().hosts)
