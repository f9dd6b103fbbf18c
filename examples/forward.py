"""Read from a web server on a host: python examples/forward.py [node1]

For a server that keeps running, such as TensorBoard: skyfab forward 6006 --host=node1
"""

import sys
from urllib.request import urlopen

import skyfab as sky


@sky.function
def serve():
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"hello from {sky.instance_info().hostname}".encode())

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


if __name__ == "__main__":
    host = sys.argv[1] if len(sys.argv) > 1 else "local"
    with sky.Compute(host) as compute:
        port = serve() >> compute
        with compute.forward(port) as forward:
            print(urlopen(forward.url).read().decode())
