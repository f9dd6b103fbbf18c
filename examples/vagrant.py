"""The boxes of a Vagrantfile, started if necessary: python examples/vagrant.py [FOLDER]"""

import sys

import skyfab as sky


@sky.function
def mean(numbers):
    mine = sky.shard(numbers)
    return sky.instance_info().hostname, sum(mine) / len(mine)


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "vagrant"
    with sky.Compute(provider=sky.Vagrant(folder, up=True)) as compute:
        for name, value in mean([1, 2, 3, 4, 5, 6]) @ compute:
            print(name, value)
