"""Parallel calls, with each result as it arrives: python examples/gather.py [node1,node2]"""

import sys
import time

import skyfab as sky


@sky.function
def wait(seconds):
    time.sleep(seconds)
    return seconds


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(hosts) as compute:
        print((wait(0.2) & wait(0.1)) >> compute)  # both in parallel; results in the order of the calls
        calls = [wait(seconds) for seconds in (0.3, 0.2, 0.1)]
        for seconds in sky.gather(*calls, stream=True, ordered=False) >> compute:
            print("arrived:", seconds)
        print(compute.map(wait, [0.01] * 5))  # many items, balanced over all hosts
