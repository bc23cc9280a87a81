"""The object store of a cluster: an S3 server, a proxy in front of it that fails on order, and a
port for orders.

    python storage_server.py ADDRESS PRINTED       its output goes to the file PRINTED

PUT /HOW, in the words of a scenario, is in force when it is answered. GET / answers how
many requests the newest order has affected. Orders are answered once the bucket exists. Objects are
kept in memory only.
"""

import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

SERVER_PORT, PROXY_PORT, ORDERS_PORT = 9000, 9001, 9002
BUCKET = "runs"
# The deed of faulty_storage.py for each order, and the requests that it affects, by method, and
# path with query.
ORDERS: dict[str, tuple[str, Callable[[str, str], bool]]] = {
    "answers 500": ("ERROR", lambda method, path: True),
    "answers 503": ("SLOW_DOWN", lambda method, path: True),
    "hangs": ("HANG", lambda method, path: True),
    "loses answers to commits": (
        "LOSE",
        lambda method, path: method == "PUT" and path.endswith("/COMMIT.json"),
    ),
    "lists what was": ("STALE", lambda method, path: "list-type" in path),
}


def main() -> None:
    # Imported here, because clients import this module only for its constants.
    import fsspec
    from faulty_storage import FaultyStorage
    from moto.server import ThreadedMotoServer
    from s3_server import ACCESS, store_one_at_a_time

    address, printed = sys.argv[1:]
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(out, standard)
    store_one_at_a_time()
    ThreadedMotoServer(port=SERVER_PORT, verbose=False).start()
    options = {"key": ACCESS["AWS_ACCESS_KEY_ID"], "secret": ACCESS["AWS_SECRET_ACCESS_KEY"]}
    endpoint = f"http://127.0.0.1:{SERVER_PORT}"
    fsspec.filesystem("s3", endpoint_url=endpoint, **options).mkdir(BUCKET)
    _take_orders(address, FaultyStorage(SERVER_PORT, (address, PROXY_PORT)))


def _take_orders(address: str, proxy: Any) -> None:
    from faulty_storage import Deed, Fault

    faults: list[Fault] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            proxy.heal()
            faults.clear()
            for deed, applies in [ORDERS[how] for how in [unquote(self.path.strip("/"))] if how in ORDERS]:
                faults.append(proxy.fail(Deed[deed], applies))
            self._say("")

        def do_GET(self) -> None:
            self._say(str(sum(fault.struck for fault in faults)))

        def _say(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer((address, ORDERS_PORT), Handler).serve_forever()


if __name__ == "__main__":
    main()
