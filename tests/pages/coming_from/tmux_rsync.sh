#!/bin/sh
# What tmux_rsync.md is about: a script that takes a while and writes a checkpoint.
set -eu
cat >train.py <<'END'
import pathlib
import time

for epoch in range(3):
    time.sleep(0.2)
    print("epoch", epoch, flush=True)
pathlib.Path("ckpt").mkdir(exist_ok=True)
pathlib.Path("ckpt/last.pt").write_bytes(bytes(1000))
END
