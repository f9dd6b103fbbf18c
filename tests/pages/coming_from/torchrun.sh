#!/bin/sh
# What torchrun.md is about: a script for torchrun.
set -eu
cat >train.py <<'END'
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # "nccl" with GPUs
total = torch.tensor(float(sys.argv[1]))
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f}")
dist.destroy_process_group()
END
