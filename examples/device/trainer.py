"""Hugging Face's Trainer with a model on a remote device: python examples/device/trainer.py [--hosts=node1]

Data, model and Trainer are on this machine, and the host needs torch only. The Trainer uses the device that was opened
first. The model is created from a configuration: nothing is downloaded. Only logs wait for the host, every 20 steps.

This machine needs both: uv pip install transformers accelerate
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import skyfab as sky
from skyfab.demo import digits


def build() -> ViTForImageClassification:
    torch.manual_seed(0)
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(**images, **size, initializer_range=0.1))


def main(hosts: str, epochs: int) -> None:
    data = digits.load()
    x, x_test = (images.view(-1, 1, 8, 8) for images in (data.x_train, data.x_test))
    rows = [{"pixel_values": image, "labels": digit} for image, digit in zip(x, data.y_train, strict=True)]
    with sky.Compute(hosts, plugins=[sky.plugins.torch()]) as compute, tempfile.TemporaryDirectory() as folder:
        compute.device()  # where the Trainer puts model and batches
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=64,
            learning_rate=5e-3,
            logging_steps=20,
            logging_nan_inf_filter=False,  # it would look at the loss of every step
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(build(), arguments, train_dataset=rows)
        trainer.train()
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']} on {trainer.model.device}: loss {float(entry['loss']):.3f}")
        model = trainer.model.cpu().eval()
    with torch.inference_mode():
        right = model(x_test).logits.argmax(1) == data.y_test
    print(f"{right.float().mean():.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="uses a device of the first host (default: this machine)")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    main(options.hosts, options.epochs)
