import os
import sys

from estimate_helper import inside

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
count = int(sys.argv[1])
hits = inside(count, seed=rank)
with open(f"hits{rank}.txt", "w") as file:
    file.write(f"{hits}\n")
print(f"{rank} of {world_size}: {4 * hits / count:.2f}")
