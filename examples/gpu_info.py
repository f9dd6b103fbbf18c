"""The GPUs of all hosts: python examples/gpu_info.py [node1,node2]

The same as a table, without a program: skyfab hosts
"""

import sys

import skyfab as sky


@sky.function
def gpus():
    import shutil
    import subprocess

    name = sky.instance_info().hostname
    if shutil.which("nvidia-smi") is None:
        return name, []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    return name, subprocess.run(query, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(hosts, ranks=1) as compute:
        for name, found in gpus() @ compute:
            print(f"{name}: {'; '.join(found) or 'no NVIDIA GPU'}")
