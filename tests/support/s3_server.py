"""A real S3 server on a free loopback port, in threads of this process, which `close` ends."""

import logging
import threading
import uuid
from typing import Any

import fsspec

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
    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer  # takes seconds

        store_one_at_a_time()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not each request
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

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
        self._server.stop()
