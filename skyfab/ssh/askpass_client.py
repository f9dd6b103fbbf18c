"""What ssh runs to ask a question (SSH_ASKPASS): passes it to the program that started ssh, and prints the answer."""

import os
import socket
import sys

connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["SKYFAB_ASKPASS"])
connection.sendall(os.fsencode(sys.argv[1]) + b"\0")
answer = b"".join(iter(lambda: connection.recv(4096), b""))
if not answer.endswith(b"\n"):
    sys.exit(1)
sys.stdout.buffer.write(answer)
