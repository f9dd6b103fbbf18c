"""Engines: other programs' ways to run many tasks, on the hosts of a pool: executors, joblib, Dask, Ray."""
