"""Dask on the hosts of a pool: python examples/dask_array.py [node1,node2]

This machine needs Dask too: uv pip install "dask[array]" distributed
"""

import sys

import dask.array as da
from distributed import as_completed

import skyfab as sky


def square(x):
    return x * x


if __name__ == "__main__":
    hosts = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(hosts, plugins=[sky.plugins.dask()]) as compute, compute.dask() as client:
        x = da.arange(1_000_000, chunks=100_000)
        print("sum:", (x * 2).sum().compute())  # Dask's collections use this client
        futures = client.map(square, range(5))
        print("squares:", sorted(future.result() for future in as_completed(futures)))
