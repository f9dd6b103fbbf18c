#!/bin/sh
# What files.md is about: 1200 files, and a script that reads them and writes a checkpoint.
set -eu
mkdir data
head -c 28333 /dev/zero >data/0
for number in $(seq 1199); do
    cp data/0 "data/$number"
done
cat >train.py <<'END'
from pathlib import Path

print(len(list(Path("data").iterdir())), "samples")
Path("ckpt").mkdir(exist_ok=True)
Path("ckpt/last.pt").write_bytes(bytes(4_700_000))
END
