from __future__ import annotations

import keras
import numpy as np
from keras import layers

import skyfab as sky


@sky.function
def fit(points: np.ndarray, labels: np.ndarray, epochs: int = 4) -> dict:
    points, labels = sky.shard(points, labels, shuffle=True, seed=1)
    model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4, activation="softmax")])
    optimizer = keras.optimizers.Adam(1e-2)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(points, labels, epochs=epochs, batch_size=20, verbose=0)
    return {
        "node": sky.instance_info().node,
        "backend": keras.backend.backend(),
        "samples": len(points),
        "losses": history.history["loss"],
    }


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 400)
    points = (2 * np.eye(4)[labels] + 0.1 * rng.normal(size=(400, 4))).astype("float32")
    plugins = [sky.plugins.jax(), sky.plugins.keras(backend="jax")]
    with sky.Compute("lab", nodes=2, plugins=plugins) as compute:
        for result in fit(points, labels) @ compute:
            first, *_, last = result["losses"]
            print(f"node {result['node']} {result['backend']}: {result['samples']}, loss {first:.4f} -> {last:.4f}")
