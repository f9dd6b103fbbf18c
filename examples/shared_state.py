"""Actors that several functions share: a dictionary, a counter, a queue, a barrier.

python examples/shared_state.py [HOSTS]
"""

import queue
import sys
import threading

import skyfab as sky


class Counter:
    def __init__(self):
        self.value = 0

    def add(self, amount=1):
        self.value += amount
        return self.value


@sky.function
def visit(names, counter, waiting, barrier):
    """Runs on every rank; calls of the handles pass through the program below."""
    rank = sky.instance_info().rank
    names[f"rank {rank}"] = rank * rank
    counter.add(10)
    waiting.put(rank)
    barrier.wait()  # returns when every rank is here
    return names.get("rank 0"), waiting.qsize()


if __name__ == "__main__":
    with sky.Compute(sys.argv[1] if len(sys.argv) > 1 else "local", ranks=2) as compute:
        ranks = compute.world_size
        names = compute.actor(dict)
        counter = compute.actor(Counter)
        waiting = compute.actor(queue.Queue, concurrency=4)
        barrier = compute.actor(threading.Barrier, ranks, concurrency=ranks)
        print("every rank saw:", set(visit(names, counter, waiting, barrier) @ compute) == {(0, ranks)})
        print("counter:", counter.add(0), "names:", len(names))
