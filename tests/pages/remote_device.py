# before block 2
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import skyfab as sky

x, y = torch.randn(8, 4), torch.randint(3, (8,))
lower, upper = nn.Linear(4, 8), nn.Linear(8, 3)


# before block 3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        return self.block(x)


def load_weights(path):
    return Net().state_dict()


def evaluate(model, batches):
    return float(model(batches).sum())


def generate(model, prompt):
    for _ in range(3):
        prompt = model(prompt)
        yield int(prompt.argmax())


compute = sky.Compute("node1,node2").open()
device = compute.device(on="node1")
with torch.device("meta"):
    model = Net()
batches, prompt = torch.randn(8, 4, device=device), torch.randn(4, device=device)


# before block 4
@sky.function
def encode(model, x):
    return model(x)


@sky.function
def load(path):
    return torch.ones(3)


x, y = batches, torch.randint(4, (8,), device=device)
optimizer = torch.optim.AdamW(model.parameters())

# before block 5
before, Model = (compute, device, model, optimizer), Net

# before block 6
compute.close()

# before block 7
sky.attach("lab").stop()
compute, device, model, optimizer = before

# after the last block
assert hidden.device == device
assert features.cpu().tolist() == [1, 1, 1]
compute.close()
