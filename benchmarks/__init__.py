"""What skyfab costs next to plain ssh, execnet and torchrunx: ratios, taken in one run on the lab.

``python -m benchmarks`` prints the table. A row is a class with a `name` and a `run` that yields results, listed in
`rows`; ours and its baseline take turns, so that a machine that slows down slows both.
"""
