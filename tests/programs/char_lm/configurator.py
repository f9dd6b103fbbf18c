"""Overrides the settings of the script that executes this file: names of files to execute, and --name=value."""

import sys
from ast import literal_eval

for word in sys.argv[1:]:
    if not word.startswith("--"):
        exec(open(word).read())
        continue
    name, value = word[2:].split("=", 1)
    if name not in globals():
        raise ValueError(f"unknown setting: {name}")
    try:
        value = literal_eval(value)
    except (SyntaxError, ValueError):
        pass  # a string
    globals()[name] = value
