"""A real S3 server on a free loopback port, in a process of its own, which `close` ends."""

import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import fsspec
from etcd_servers import free_port

LIMIT_S = 120.0
ACCESS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def store_one_at_a_time() -> None:
    """Let moto serve one PUT of an object at a time, in this process.

    It looks whether the object exists and then stores it, on a thread for each request. So of two
    exclusive creations at once both could succeed, which S3 never lets happen.
    """
    from moto.s3.responses import S3Response

    put_object, lock = S3Response.put_object, threading.Lock()

    def put_one(*arguments: Any) -> Any:
        with lock:
            return put_object(*arguments)

    S3Response.put_object = put_one  # type: ignore[assignment, method-assign]


class S3Server:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        log = folder / "moto.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + LIMIT_S
        while not self._answers():
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which a process finds the server."""
        return ACCESS | {"AWS_ENDPOINT_URL": self.endpoint}

    def bucket(self) -> str:
        """The URL of a new bucket."""
        name = f"b-{uuid.uuid4().hex}"
        options = {"key": "testing", "secret": "testing", "endpoint_url": self.endpoint}
        fsspec.filesystem("s3", skip_instance_cache=True, **options).mkdir(name)
        return f"s3://{name}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False


if __name__ == "__main__":
    from moto.server import main

    store_one_at_a_time()
    main(sys.argv[1:])
