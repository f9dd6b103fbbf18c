"""Send data, fetch results: python examples/files.py [node1,node2]"""

import sys
import tempfile
from pathlib import Path

import skyfab as sky


@sky.function
def count_words():
    text = Path("text.txt").read_text()
    Path("counts").mkdir(exist_ok=True)
    rank = sky.instance_info().rank
    Path(f"counts/{rank}.txt").write_text(str(len(text.split())))


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with tempfile.TemporaryDirectory() as folder, sky.Compute(hosts, workdir="temp") as compute:
        data = Path(folder, "text.txt")
        data.write_text("the quick brown fox " * 1000)
        compute.upload(data, to="text.txt")
        count_words() @ compute
        compute.download("counts", to=Path(folder, "back"))
        for path in sorted(Path(folder, "back").rglob("*.txt")):
            print(path.name, path.read_text())
