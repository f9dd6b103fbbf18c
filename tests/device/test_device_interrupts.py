"""Ctrl-C at any moment: a device stays usable, and its tensors are as if the program had stopped between two lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

BEGIN = """
import os, random, signal, threading, time
import skyfab as sky
import torch

def interrupted(action, after):
    "Whether Ctrl-C has ended the action. It comes once, `after` seconds into the action."
    arrived = threading.Event()
    def press():
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGINT)
        arrived.set()
    thread = threading.Thread(target=press)
    try:
        thread.start()
        action()
        arrived.wait()
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False

compute = sky.Compute("local", ui="none")
compute.open()
device = compute.device("cpu")
"""


def run(code: str) -> str:
    """What a program prints that has a device of this machine."""
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + code + "\ncompute.close()"], capture_output=True, text=True, timeout=170
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_between_operations() -> None:
    """Each operation was executed once or, if it is the one that was interrupted, once or not at all."""
    code = """
number = torch.zeros(100, dtype=torch.int64, device=device)
done = 0

def count():
    global done
    while True:
        number.add_(1)
        done += 1

for _ in range(30):
    assert interrupted(count, random.uniform(0, 0.03))
    found = set(number.tolist())
    assert found in ({done}, {done + 1}), (found, done)
    (done,) = found
print("counted", done > 1000)
"""
    assert run(code) == "counted True\n"


def test_while_the_program_waits_for_a_value_or_a_generator() -> None:
    code = """
a = torch.ones(3, device=device)

def ask():
    sky.run_on(device, time.sleep, 3)

def sum_later():
    with torch.no_grad():
        a.add_(1)
        a.sum().item()

begin = time.monotonic()
assert interrupted(ask, 0.5)
assert interrupted(sum_later, 0.5)
print("at once", time.monotonic() - begin < 2.5)
print(a.tolist())

def numbers():
    for number in range(4):
        time.sleep(0.5)
        yield number

found, values = [], sky.run_on(device, numbers)
for _ in range(3):
    interrupted(lambda: found.append(next(values)), 0.2)
print([*found, *values])
"""
    assert run(code) == "at once True\n[2.0, 2.0, 2.0]\n[0, 1, 2, 3]\n"


def test_results_that_nothing_waits_for_are_freed() -> None:
    """Those of a mask, of a function, and of a generator."""
    code = """
a = torch.ones(3, device=device)

def later():
    time.sleep(1)
    return [torch.ones(3) for _ in range(5)]

def yielding():
    while True:
        time.sleep(0.2)
        yield torch.ones(3)

@sky.function
def busy(x):
    time.sleep(1.5)

a[a > 0]  # what PyTorch imports for it is there
before = sky.memory(device)["tensors"]
for action in (
    lambda: a[a > 0],
    lambda: sky.run_on(device, later),
    lambda: list(sky.run_on(device, yielding)),
):
    future = compute.submit(busy(a))
    assert interrupted(action, 0.7)
    future.result()
    sky.synchronize()
    print(sky.memory(device)["tensors"] - before)
"""
    assert run(code) == "0\n0\n0\n"


def test_while_a_device_is_opened() -> None:
    """It can be opened again; nothing of the attempt stays in the program."""
    code = """
with sky.Compute("local", ui="none") as other:
    assert interrupted(lambda: other.device("cpu"), 0.2)
    assert float(torch.ones(3, device=other.device("cpu")).sum()) == 3
compute.close()
end = time.monotonic() + 60
while (left := [thread.name for thread in threading.enumerate()]) != ["MainThread"] and time.monotonic() < end:
    time.sleep(0.01)
print(left)
"""
    assert run(code) == "['MainThread']\n"
