"""Trains a model of characters, in one process or in those of torchrun:

python train.py config/tiny.py --max_iters=100
torchrun --nproc-per-node=2 train.py config/tiny.py --init_from=resume
"""

import os
import pickle
from dataclasses import asdict

import numpy as np
import torch
from model import Model, ModelConfig
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out"
init_from = "scratch"  # or "resume"
dataset = "verse"
max_iters = 1000
batch_size = 16
learning_rate = 1e-3
log_interval = 10
width, heads, layers, context = 64, 4, 2, 64
config_keys = [
    key for key, value in globals().items() if not key.startswith("_") and isinstance(value, (int, float, str))
]
exec(open("configurator.py").read())
config = {key: globals()[key] for key in config_keys}

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
is_master = rank == 0
if is_master:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + rank)

folder = os.path.join("data", dataset)
data = np.memmap(os.path.join(folder, "train.bin"), dtype=np.uint16, mode="r")
with open(os.path.join(folder, "meta.pkl"), "rb") as file:
    chars = pickle.load(file)["chars"]


def get_batch():
    starts = torch.randint(len(data) - context - 1, (batch_size,))
    rows = torch.stack([torch.from_numpy(data[start : start + context + 1].astype(np.int64)) for start in starts])
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


model_args = dict(vocabulary=len(chars), context=context, width=width, heads=heads, layers=layers)
first = 0
checkpoint = None
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model_args, first = checkpoint["model_args"], checkpoint["iter_num"]
    print(f"resuming at iteration {first}")
model = Model(ModelConfig(**model_args)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if checkpoint is not None:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
raw_model = model
if ddp:
    model = DDP(model)

for iter_num in range(first, max_iters + 1):
    inputs, targets = get_batch()
    _, loss = model(inputs, targets)
    if iter_num % log_interval == 0:
        mean = loss.detach().clone()
        if ddp:
            all_reduce(mean)
        if is_master:
            print(f"iter {iter_num}: loss {mean.item() / world_size:.4f}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
if is_master:
    state = {
        "model": raw_model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": asdict(raw_model.config),
        "iter_num": max_iters,
        "config": config,
    }
    torch.save(state, os.path.join(out_dir, "ckpt.pt"))
if ddp:
    destroy_process_group()
