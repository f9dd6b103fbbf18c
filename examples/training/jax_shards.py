"""One JAX program over all ranks: python examples/training/jax_shards.py [--hosts=node1,node2]

`plugins.jax` connects the ranks, and `jax.devices()` lists the devices of all. Each rank puts its share of the digits
on its own devices; the weights are on every device, and the compiler adds the communication.
This machine needs JAX too: uv pip install jax numpy
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import skyfab as sky
from skyfab.demo import DIGITS

Weights = list[tuple[jax.Array, jax.Array]]


def scores(weights: Weights, x: jax.Array) -> jax.Array:
    (inner, inner_bias), (outer, outer_bias) = weights
    return jnp.tanh(x @ inner + inner_bias) @ outer + outer_bias


def loss(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(weights, x)), y[:, None], axis=1).mean()


def step(weights: Weights, x: jax.Array, y: jax.Array) -> tuple[Weights, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda weight, gradient: weight - 0.5 * gradient, weights, gradients), value


@sky.function
def train(weights: Weights, x: np.ndarray, y: np.ndarray, steps: int) -> tuple[Weights, list[float], int]:
    mesh = Mesh(jax.devices(), ("ranks",))
    split, same = NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())
    x, y = (jax.make_array_from_process_local_data(split, part) for part in sky.shard(x, y, drop_last=True))
    weights = jax.device_put(weights, same)
    improve = jax.jit(step)
    losses = []
    for _ in range(steps):
        weights, value = improve(weights, x, y)
        losses.append(value.item())
    print(f"process {jax.process_index()} of {jax.process_count()}: loss {losses[0]:.3f} → {losses[-1]:.3f}")
    return jax.device_get(weights), losses, len(x)


def main(hosts: str) -> None:
    table = np.loadtxt(DIGITS, delimiter=",", skiprows=1, dtype=np.int32)
    x, y = table[:, 1:] / np.float32(16), table[:, 0]
    random = np.random.default_rng(0)
    sizes = [(64, 64), (64, 10)]
    weights = [(random.normal(0, 0.1, size).astype("f"), np.zeros(size[1], "f")) for size in sizes]
    ranks = 2 if hosts == "local" else "auto"
    with sky.Compute(hosts, ranks=ranks, plugins=[sky.plugins.jax()]) as compute:
        results = train(weights, x[360:], y[360:], steps=100) @ compute
    agree = all(losses == results[0][1] for _, losses, _ in results)
    print(f"{len(results)} ranks {'agree' if agree else 'do not agree'} on the loss of {results[0][2]} images")
    right = np.argmax(scores(results[0][0], x[:360]), axis=1) == y[:360]
    print(f"{right.mean():.0%} of the held-out digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="local", help="the hosts to train on (default: two ranks on this machine)")
    main(parser.parse_args().hosts)
