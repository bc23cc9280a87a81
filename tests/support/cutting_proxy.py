"""A proxy in front of an HTTP server that can lose answers after the server has acted on the
request.
"""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class CuttingProxy:
    """Closes the connection instead of passing on the answer to a request whose body contains
    `lose`.

    lost: number of answers that were lost.
    """

    def __init__(self, port: int) -> None:
        proxy = self
        self.lose: bytes | None = None
        self.lost = 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                server.request("POST", self.path, body, {"Content-Type": "application/json"})
                answer = server.getresponse()
                data = answer.read()
                server.close()
                if proxy.lose is not None and proxy.lose in body:
                    proxy.lost += 1
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
