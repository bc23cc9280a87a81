"""A cloud is a row: where its notices are asked for, and how their answers are read.

AWS: `spot/instance-action`, two minutes ahead. The recommendation to rebalance is no notice: the
instance may live for days. Azure: an event of type Preempt or Terminate that names this VM, thirty
seconds ahead; none is acknowledged, which would let the VM be taken before its last step is saved.
Google Cloud: `instance/preempted`, thirty seconds ahead (docs/decisions/0023).
"""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

from elastic.agent.clouds.metadata import NoAnswer, Silence, request
from elastic.config.options import CloudName
from elastic.system.untrusted import decode, fits, pattern

ADDRESS = "http://169.254.169.254"  # of all three
_TOKEN, _TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
_METADATA = {"Metadata": "true"}
_SHORT_TEXT = Annotated[str, pattern("[ -~]{1,200}", "a short text")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """variable: of the environment, names another address; those of the clouds' own programs.

    ask: given the URL and the limit of the answer, None for the usual one, returns why this machine
    is taken away, None where it is not; raises NoAnswer. A time in an answer is only shown.
    """

    name: str
    variable: str
    ask: Callable[[str, float | None], str | None]
    first_answer_s: float | None = None
    url: str = ADDRESS


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureEvent:
    EventType: str
    Resources: tuple[str, ...]


def _ask_aws(url: str, _answer_s: float | None) -> str | None:
    """IMDSv2, which every instance answers; a token for each time needs no renewal."""
    try:
        answer = request(url, "/latest/api/token", {_TTL: "60"}, method="PUT")
    except Silence as error:  # an answer that may take one hop reaches no container
        raise NoAnswer(f"{error}; for a container the instance needs a hop limit of 2") from error
    if answer.status == HTTPStatus.FORBIDDEN:
        raise NoAnswer("HTTP 403: the instance's metadata service is switched off")
    token = answer.text()
    if not fits(token, _SHORT_TEXT):
        raise NoAnswer("an answer that is no token")
    answer = request(url, "/latest/meta-data/spot/instance-action", {_TOKEN: token})
    if answer.status == HTTPStatus.NOT_FOUND:
        return None
    found = answer.json_fields()
    action, time = found.get("action"), found.get("time")
    if not fits(action, _SHORT_TEXT):
        raise NoAnswer("expected an action in spot/instance-action, found none")
    return f"{action} at {time if fits(time, _SHORT_TEXT) else 'an unknown time'}"


def _ask_gcp(url: str, _answer_s: float | None) -> str | None:
    answer = request(url, "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if answer.headers.get("Metadata-Flavor") != "Google":
        raise NoAnswer(f"HTTP {answer.status} of a service that is not Google Cloud's")
    if (found := answer.text().upper()) not in ("TRUE", "FALSE"):
        raise NoAnswer(f"expected TRUE or FALSE in instance/preempted, found {found!r:.80}")
    return "preempted" if found == "TRUE" else None


def _ask_azure(url: str, answer_s: float | None) -> str | None:
    """An event that cannot be read, perhaps of another VM, hides no notice, and is no answer."""
    machine = request(
        url, "/metadata/instance/compute/name?api-version=2021-02-01&format=text", _METADATA
    ).text()
    if not fits(machine, _SHORT_TEXT):
        raise NoAnswer("an answer that is no name of a VM")
    events = (
        request(url, "/metadata/scheduledevents?api-version=2020-07-01", _METADATA, answer_s=answer_s)
        .json_fields()
        .get("Events")
    )
    if not isinstance(events, list):
        raise NoAnswer("expected a list of Events in scheduledevents, found none")
    unread = None
    for event in events:
        try:
            read = decode(AzureEvent, event, what="an event of scheduledevents", exact=False)
        except ValueError as error:
            unread = error
            continue
        is_here = machine.casefold() in map(str.casefold, read.Resources)
        # Freeze, Reboot and Redeploy leave the VM where it is.
        if is_here and read.EventType in ("Preempt", "Terminate"):
            when = event.get("NotBefore")  # empty where it has begun
            return read.EventType + (f", not before {when}" if fits(when, _SHORT_TEXT) else "")
    if unread is not None:
        raise NoAnswer(str(unread)) from unread
    return None


CLOUDS: dict[CloudName, Cloud] = {
    "aws": Cloud(name="AWS", variable="AWS_EC2_METADATA_SERVICE_ENDPOINT", ask=_ask_aws),
    "gcp": Cloud(name="Google Cloud", variable="GCE_METADATA_HOST", ask=_ask_gcp),
    # The first request of a VM switches its events on, which takes up to two minutes.
    "azure": Cloud(
        name="Azure", variable="AZURE_METADATA_SERVICE_ENDPOINT", ask=_ask_azure, first_answer_s=130.0
    ),
}
