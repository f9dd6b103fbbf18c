# Run by each interpreter that env/probe.sh finds, with a number and the path where it was found. Prints a line with
# that number, its version and its real path, also for one behind a link, a venv or a wrapper. A Python that is too old
# prints nothing.
import posix
import sys

v = sys.version_info
q = f"{sys.base_prefix}/bin/python{v[0]}.{v[1]}"
if not posix.access(q, 1):
    q = sys.argv[2]
if v >= (3, 10) and sys.implementation.name == "cpython" and q.isprintable():
    print("python " + sys.argv[1], sys.version.split()[0], q)
