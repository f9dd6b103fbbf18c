from pathlib import Path

import skyfab as sky

Path("data").mkdir(exist_ok=True)
Path("data", "x.csv").write_text("1,2\n")


@sky.function
def train():
    Path("ckpt").mkdir(exist_ok=True)
    Path("ckpt", "last.pt").write_text(Path("data/x.csv").read_text())


# after the last block
assert Path("results/ckpt/last.pt").read_text() == "1,2\n"
