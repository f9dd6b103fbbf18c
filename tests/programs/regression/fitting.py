import numpy as np


def fit(x, y, degree, *, steps, lr):
    powers = np.stack([x**power for power in range(degree + 1)], axis=1)
    weights, losses = np.zeros(degree + 1), []
    for _ in range(steps):
        error = powers @ weights - y
        losses.append(float((error**2).mean()))
        weights -= lr * 2 * powers.T @ error / len(x)
    return weights.tolist(), losses
