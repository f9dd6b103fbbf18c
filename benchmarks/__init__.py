"""Benchmarks of skyfab against plain ssh, execnet and torchrunx, on hosts of the lab. Reports ratios, from one run.

``python -m benchmarks`` prints the table. A row is a class with a `name` and a `run` that yields results, listed in
`rows`. Measurements of skyfab and of the baseline alternate, so that a slow phase of the machine affects both.
"""
