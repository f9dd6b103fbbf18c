import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(0)
centers = rng.normal(size=(4, 8))
labels = rng.integers(0, 4, 400)
points = (centers[labels] + 0.3 * rng.normal(size=(400, 8))).astype("float32")

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), layers.Dense(32, activation="relu"), layers.Dense(4)])
model.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(points, labels, epochs=5, batch_size=32, verbose=0).history
print(f"{keras.backend.backend()}: loss {history['loss'][0]:.4f} -> {history['loss'][-1]:.4f}")
model.save("model.keras")
