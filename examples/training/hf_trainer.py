"""Hugging Face's Trainer on every rank: python examples/training/hf_trainer.py [--hosts=node1,node2]

A small vision transformer learns to read digits. It is created from a configuration: nothing is downloaded. The
Trainer uses the process group of `plugins.torch` and splits the data. With `--hosts`, this machine does not need
transformers; without: uv pip install transformers accelerate
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import Tensor, nn

import skyfab as sky
from skyfab.demo import digits


def build() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(**images, **size, initializer_range=0.1))


@sky.function
def train(data: digits.Split) -> tuple[dict[str, Tensor], list[float], float]:
    """The weights, the losses on the way, and the fraction of held-out digits that are read right."""
    from transformers import Trainer, TrainingArguments

    model, (x, x_test) = build(), (images.view(-1, 1, 8, 8) for images in (data.x_train, data.x_test))
    rows = [{"pixel_values": image, "labels": digit} for image, digit in zip(x, data.y_train, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=4,
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    print(f"rank {arguments.process_index} of {arguments.world_size} took {trainer.state.global_step} steps")
    model = model.cpu().eval()
    with torch.inference_mode():
        right = model(x_test).logits.argmax(1) == data.y_test
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model.state_dict(), losses, right.float().mean().item()


def main(hosts: str) -> None:
    plugins = [sky.plugins.torch(), sky.plugins.huggingface(), sky.plugins.accelerate()]
    ranks = 2 if hosts == "local" else "auto"
    with sky.Compute(hosts, ranks=ranks, plugins=plugins) as compute:
        states, losses, right = zip(*(train(digits.load()) @ compute), strict=True)
    same = all(torch.equal(value, other[name]) for other in states for name, value in states[0].items())
    print(f"loss {losses[0][0]:.2f} → {losses[0][-1]:.2f}, {'the same' if same else 'different'} weights on all ranks")
    print(f"{right[0]:.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="the hosts to train on (default: two ranks on this machine)")
    main(parser.parse_args().hosts)
