"""A Keras model, fitted by every rank to its share: python examples/training/keras_shards.py [--hosts=node1,node2]

The model is sent unchanged; each rank fits it to its own part of the digits, and this machine averages the weights.
`--backend=torch` does the same with another backend: `plugins.keras` installs and selects it on the hosts.
This machine needs Keras and the backend too: uv pip install keras jax
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

import skyfab as sky
from skyfab.demo import DIGITS


@sky.function
def fit(model: Any, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    import keras

    x, y = sky.shard(x, y, shuffle=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss)
    losses = model.fit(x, y, epochs=5, batch_size=32, verbose=0).history["loss"]
    print(f"{len(y)} images with {keras.backend.backend()}: loss {losses[0]:.3f} → {losses[-1]:.3f}")
    return model.get_weights()


def build() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def mean(weights: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The weights of one model whose every layer is the mean of theirs."""
    return [np.mean(layer, axis=0) for layer in zip(*weights, strict=True)]


def main(hosts: str, backend: Any) -> None:
    os.environ["KERAS_BACKEND"] = backend  # as on the hosts: before keras is imported
    model = build()
    table = np.loadtxt(DIGITS, delimiter=",", skiprows=1, dtype=np.int32)
    x, y = table[:, 1:] / np.float32(16), table[:, 0]
    ranks = 2 if hosts == "local" else "auto"
    with sky.Compute(hosts, ranks=ranks, plugins=[sky.plugins.keras(backend=backend)]) as compute:
        weights = fit(model, x[360:], y[360:]) @ compute
    for name, its in [*((f"rank {rank}", its) for rank, its in enumerate(weights)), ("all", mean(weights))]:
        model.set_weights(its)
        right = model.predict(x[:360], verbose=0).argmax(axis=1) == y[:360]
        print(f"{name}: {right.mean():.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="the hosts to train on (default: two ranks on this machine)")
    parser.add_argument("--backend", default="jax", choices=["jax", "torch", "tensorflow"])
    options = parser.parse_args()
    main(options.hosts, options.backend)
