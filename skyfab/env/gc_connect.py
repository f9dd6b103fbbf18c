# Tries to connect to the agent whose run folder is the first argument, for env/gc.sh.
# Exit status 8: no process listens on its socket; 9: one does.
import errno
import os
import socket
import sys

os.chdir(sys.argv[1])
s = socket.socket(socket.AF_UNIX)
s.settimeout(5)
sys.exit(8 if s.connect_ex("agent.sock") in (errno.ECONNREFUSED, errno.ENOENT) else 9)
