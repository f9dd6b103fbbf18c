"""Two containers as hosts for commands and other programs, until Enter: python examples/container_hosts.py [IMAGE]"""

import sys
import tempfile
from pathlib import Path

import skyfab as sky

if __name__ == "__main__":
    options = {"image": sys.argv[1]} if len(sys.argv) > 1 else {}
    with sky.Container(nodes=2, **options) as inventory, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "inventory.toml"
        file.write_text(inventory.to_toml())
        print(f"export SKYFAB_INVENTORY={file}", flush=True)
        print("node1 and node2 are up: use that line in another terminal. Press Enter to stop them.", file=sys.stderr)
        sys.stdin.readline()
