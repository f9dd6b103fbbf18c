"""TensorBoard on a host, in a browser on this machine: python examples/forward_tensorboard.py [node1]

At a terminal, it runs until you press Enter. For one that runs longer, see docs/forward.md.
"""

import json
import sys
import time
from urllib.parse import urlsplit
from urllib.request import urlopen

import skyfab as sky


@sky.function
def train(steps):
    from tensorboard.summary import Writer

    writer = Writer("board")
    for step in range(steps):
        writer.add_scalar("loss", 1 / (step + 1), step)
    writer.close()


@sky.function
def serve():
    from tensorboard.program import TensorBoard

    board = TensorBoard()
    board.configure(argv=["tensorboard", "--logdir=board", "--host=127.0.0.1", "--port=0", "--load_fast=false"])
    return urlsplit(board.launch()).port  # a thread of this process, which ends with the pool


if __name__ == "__main__":
    host = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(host, image=sky.Image(pip=["tensorboard"]), workdir="temp") as compute:
        train(10) >> compute
        port = serve() >> compute
        with compute.forward(port) as forward:
            print(forward.url)
            while not (tags := json.load(urlopen(f"{forward.url}/data/plugin/scalars/tags"))):
                time.sleep(0.1)  # it has not read the folder yet
            print("scalars:", *tags["."])
            if sys.stdin.isatty():
                input("Press Enter to stop ")
