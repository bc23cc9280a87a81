"""The object store of a cluster: a server that speaks S3, a proxy before it that fails as ordered, and a port that takes orders.

    python storage_server.py ADDRESS PRINTED       what it prints goes to the file PRINTED

PUT /NAME with the name of a `scenario.Storage` is in force when it is answered; GET / says how many requests the newest order has struck. Orders are taken once there is a bucket.
What is stored is in memory alone.
"""

import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SERVER_PORT, PROXY_PORT, ORDERS_PORT = 9000, 9001, 9002
BUCKET = "runs"
ACCESS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_HEAL = "HEAL"


def main() -> None:
    # Here, because whoever gives orders needs the ports alone.
    import fsspec
    from faulty_storage import FaultyStorage
    from moto.server import ThreadedMotoServer

    address, printed = sys.argv[1:]
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(out, standard)
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
            name = self.path.strip("/")
            proxy.heal()
            faults.clear()
            if name != _HEAL:
                faults.append(proxy.fail(Deed[name], APPLIES.get(name, lambda method, path: True)))
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


# To which requests, by method and path with its query; to all where nothing is said.
APPLIES: dict[str, Callable[[str, str], bool]] = {
    "LOSE": lambda method, path: method == "PUT" and path.endswith("/COMMIT.json"),
    "STALE": lambda method, path: "list-type" in path,
}

if __name__ == "__main__":
    main()
