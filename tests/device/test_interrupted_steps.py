"""Ctrl-C at any moment of a training step: it is raised, the process goes on, and so does the device."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import collections, os, random, signal, sys, threading, time
import skyfab as sky
import torch
from torch import nn

times = int(sys.argv[1])
chance = random.Random(times)
compute = sky.Compute("local", ui="none")
compute.open()
device = compute.device("cpu")
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
data = torch.randn(64, 8)
x = data.to(device)
steps = 0

def forward():
    with torch.no_grad():
        model(x[1:]).pow(2).mean()

def backward():
    model(x).pow(2).mean().backward()

def step():
    global steps
    optimizer.zero_grad()
    backward()
    optimizer.step()
    steps += 1

def upload():
    (data.to(device) + 1)[3:].relu()

def wait():
    model(x).sum().item()

def show():
    str(model(x))

def here():
    "No remote tensor, but PyTorch asks the device's guard all the same."
    data.detach().requires_grad_().pow(2).sum().backward()

def interrupted(action):
    "Seconds until Ctrl-C has ended an action that never ends by itself."
    pressed = 0.0
    def press():
        nonlocal pressed
        time.sleep(chance.uniform(0, 0.03))
        pressed = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=press)
    try:
        thread.start()
        while True:
            action()
    except KeyboardInterrupt:
        took = time.monotonic() - pressed
    torch.set_grad_enabled(True)  # it may have come while `no_grad` ended, as it may without remote devices
    thread.join()
    return took

actions = [forward, backward, step, upload, wait, show, here]
for action in actions:
    action()
taken = collections.defaultdict(list)
for at in range(times):
    if at == times // 2:  # as notebooks do for each cell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    action = actions[at % len(actions)]
    taken[action.__name__].append(interrupted(action))
done = steps
step()
assert torch.isfinite(model(x)).all().item() and steps == done + 1
compute.close()
for _ in range(times // 10):
    taken["closed"].append(interrupted(here))
print(sum(map(len, taken.values())), {name: f"{max(found):.3f}" for name, found in taken.items()}, file=sys.stderr)
print("ended")
"""


@pytest.mark.slow
def test_every_interrupt_is_raised_and_the_device_goes_on() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, "21"], capture_output=True, text=True, timeout=170)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr[-3000:]
