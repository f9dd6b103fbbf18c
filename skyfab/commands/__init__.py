"""What the tasks of `skyfab` do, as plain functions; `cli.py` gives them their command line."""
