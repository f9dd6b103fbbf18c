"""A run that outlives its program: python examples/detached.py [node1,node2]

You can run the printed command in any terminal, during the run and after it.
"""

import sys
import time

import skyfab as sky


@sky.function
def count(to):
    for number in range(to):
        print("at", number, flush=True)
        time.sleep(0.1)
    return to


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(hosts, ranks=1) as compute:
        run = compute.launch(count(5), name="count")
    again = sky.attach(run.id, hosts)  # as another program would tomorrow
    print(again.result(timeout=60))
    print(f"skyfab logs {again.name}")
