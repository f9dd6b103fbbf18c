"""Engines: run tasks of executors, joblib, Dask and Ray on the hosts of a pool."""
