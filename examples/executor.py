"""A pool as an executor of the standard library: python examples/executor.py [node1,node2]"""

import asyncio
import math
import sys
from concurrent.futures import as_completed

import skyfab as sky


def primes(first, last):
    return sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(max(first, 2), last))


async def both(executor):
    loop = asyncio.get_running_loop()
    return await asyncio.gather(*(loop.run_in_executor(executor, primes, 0, last) for last in (100, 1000)))


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(hosts, slots=2) as compute, compute.executor() as executor:
        print(executor.submit(primes, 0, 10).result())
        futures = [executor.submit(primes, first, first + 5000) for first in range(0, 20_000, 5000)]
        print(sum(future.result() for future in as_completed(futures)))
        print(list(executor.map(math.sqrt, [1, 4, 9, 16], chunksize=2)))
        print(asyncio.run(both(executor)))
