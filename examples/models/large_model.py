"""A large model is sent to each host once, and used by many calls: python examples/models/large_model.py [hosts]"""

from __future__ import annotations

import sys

import nets
import torch
from torch import Tensor

import skyfab as sky
from skyfab.demo import digits


@sky.function
def read(net: nets.Net, x: Tensor, y: Tensor, noise: float) -> float:
    torch.manual_seed(0)
    return nets.accuracy(net, x + noise * torch.randn(x.shape), y)


def main(hosts: str) -> None:
    data = digits.load()
    torch.manual_seed(0)
    net = nets.Net(width=1024, blocks=4)
    with torch.no_grad():
        features = net.features(data.x_train)
    nets.learn(net.out, features, data.y_train, steps=40, lr=3e-3)  # training only the last layer is enough
    with sky.Compute(hosts or "local", plugins=[sky.plugins.torch()]) as compute:
        model = compute.put(net)
        print(f"{model}: {sum(weights.numel() for weights in net.parameters()) / 1e6:.1f} million weights")
        noises = (0.0, 0.2, 0.4, 0.8)
        calls = [read(model, data.x_test, data.y_test, noise) for noise in noises]
        for noise, right in zip(noises, sky.gather(*calls) >> compute, strict=True):
            print(f"noise {noise}: {right:.0%} read right")
        sent = sum(host.session.moved[0] for host in compute.hosts)
        print(f"{len(calls)} calls, {sent / model.size:.1f} times the model sent to {len(compute.hosts)} host(s)")


if __name__ == "__main__":
    main(",".join(sys.argv[1:]))
