"""Detached runs: finding them on their hosts, and reading their state, logs and results."""
