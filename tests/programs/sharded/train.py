"""Trains a model whose parameters are sharded over all ranks: torchrun --nproc-per-node=2 train.py --steps 20"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from checkpointer import latest, load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="checkpoints")
    args = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank = dist.get_rank()
    model = build(init_device_mesh(kind, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = latest(args.folder)
    if first:
        load(args.folder, first, model, optimizer)
        print(f"rank {rank}: continues after step {first}")

    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank))
    y = x[:, :4].sin()
    for step in range(first + 1, first + args.steps + 1):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (first + 1, first + args.steps):
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.5f}")
    save(args.folder, step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
