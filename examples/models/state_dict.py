"""A state_dict is sent to a host, trained and returned: python examples/models/state_dict.py [hosts]

The network is your own class, in your own file (nets.py): hosts import it as this script does.
"""

from __future__ import annotations

import sys

import nets
import torch
from torch import Tensor

import skyfab as sky
from skyfab.demo import digits

State = dict[str, Tensor]


@sky.function
def train(state: State, x: Tensor, y: Tensor) -> tuple[State, float]:
    net = nets.Net()
    net.load_state_dict(state)
    loss = nets.learn(net, x, y, steps=60, lr=1e-2)
    return net.state_dict(), loss


def main(hosts: str) -> None:
    data = digits.load()
    torch.manual_seed(0)
    net = nets.Net()
    print(f"{nets.accuracy(net, data.x_test, data.y_test):.0%} of the held-out digits before")
    with sky.Compute(hosts or "local", plugins=[sky.plugins.torch()]) as compute:
        state, loss = train(net.state_dict(), data.x_train, data.y_train) >> compute
        print(f"trained on {compute.hosts[0].name}: {len(state)} tensors came back, loss {loss:.3f}")
    net.load_state_dict(state)
    print(f"{nets.accuracy(net, data.x_test, data.y_test):.0%} of the held-out digits after")


if __name__ == "__main__":
    main(",".join(sys.argv[1:]))
