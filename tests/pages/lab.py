import atexit
import os

import skyfab as sky
from skyfab.lab import Lab, sshd

up = Lab.start(count=2)  # as `skyfab lab.up` has done
atexit.register(up.stop)
os.environ["SKYFAB_INVENTORY"] = str(up.inventory)

# before block 2
cable = up.hosts[1]
assert not sshd.greets(cable.address, cable.port)
lab.hosts[1].restore()
assert sshd.greets(cable.address, cable.port)
