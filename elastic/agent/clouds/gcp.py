"""A VM of Google Cloud is told of its preemption thirty seconds ahead, by `instance/preempted`.

The service holds a request until that changes, for a while, so the notice arrives at once. Without
an etag of the value that was seen last, a change in between would be missed: then nothing waits.
"""

from urllib.parse import urlencode

from elastic.agent.clouds.metadata import ANSWER_S, MetadataService, NoAnswer

ADDRESS = "http://169.254.169.254"  # metadata.google.internal, without asking a name server
WAIT_S = 15  # less than a notice is ahead, should a request be lost
_FLAVOR = {"Metadata-Flavor": "Google"}
_VALUES = {"TRUE": True, "FALSE": False}


class Gcp:
    name = "Google Cloud"

    def __init__(self, service: MetadataService) -> None:
        self.url = service.url
        self._service = service
        self._etag: str | None = None  # of the value in the newest answer

    def ask(self) -> str | None:
        """Waits for a change, WAIT_S at most; why this VM goes, None where it does not. Raises
        NoAnswer.
        """
        path, answer_s, etag = "/computeMetadata/v1/instance/preempted", ANSWER_S, self._etag
        if etag is not None:
            path += "?" + urlencode({"wait_for_change": "true", "timeout_sec": WAIT_S, "last_etag": etag})
            answer_s += WAIT_S
        self._etag = None  # after a failure the next request is answered at once, or fails
        answer = self._service.ask(path, _FLAVOR, answer_s=answer_s)
        if answer.headers.get("metadata-flavor") != "Google":
            raise NoAnswer(f"HTTP {answer.status} of a service that is not Google Cloud's")
        answer.expect_ok()
        if answer.text.upper() not in _VALUES:
            raise NoAnswer(f"expected TRUE or FALSE in instance/preempted, found {answer.text!r:.80}")
        self._etag = answer.headers.get("etag")
        return "preempted" if _VALUES[answer.text.upper()] else None
