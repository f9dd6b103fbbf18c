"""The work of each rank of a gang: joins the process group and adds up the ranks. A script, as torchrun runs one."""

from __future__ import annotations


def main() -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    print(f"sum {total.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
