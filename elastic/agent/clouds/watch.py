"""A machine that its cloud takes away leaves within seconds of the notice; else nothing happens.

A service that does not answer is reported once, and asked again ever more rarely, as long as the
node trains. No time of the cloud is compared with a clock of this machine.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from elastic.agent.clouds import aws, azure, gcp
from elastic.agent.clouds.metadata import MetadataService, NoAnswer
from elastic.config.options import CloudName
from elastic.errors import UsageError
from elastic.system.addresses import split_endpoint
from elastic.system.clock import Clock

EVERY_S = 2.0
# No longer: the shortest notice is of thirty seconds.
LONGEST_PAUSE_S = 10.0
OUTAGE_ASKS = 3  # that fail in a row; one alone is no news where others were answered
_PORTS = {"http": 80, "https": 443}

# The variables that the clouds' own programs read; Azure's have none.
VARIABLES: dict[CloudName, str] = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "gcp": "GCE_METADATA_HOST",
    "azure": "AZURE_METADATA_SERVICE_ENDPOINT",
}


class Cloud(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    def ask(self) -> str | None:
        """Why this machine is taken away, None where it is not. Raises NoAnswer."""


def open_cloud(
    name: CloudName, environ: Mapping[str, str], clock: Clock, report: Callable[[str], None]
) -> Cloud:
    """report: is told of parts of an answer that cannot be read, where others count.

    Raises UsageError for an address in the environment that is none.
    """
    url = metadata_address(name, environ)
    match name:
        case "aws":
            return aws.Aws(MetadataService(url or aws.ADDRESS), clock)
        case "gcp":
            return gcp.Gcp(MetadataService(url or gcp.ADDRESS))
        case "azure":
            return azure.Azure(MetadataService(url or azure.ADDRESS), report)


def metadata_address(name: CloudName, environ: Mapping[str, str]) -> str | None:
    """The URL that the environment names in place of the cloud's own. Raises UsageError."""
    variable = VARIABLES[name]
    text = environ.get(variable, "").strip()
    if not text:
        return None
    form, url = ("HOST[:PORT]", f"http://{text}") if name == "gcp" else ("http://HOST[:PORT]", text)
    scheme, _, rest = url.rstrip("/").partition("://")
    try:
        host, port = split_endpoint(rest, _PORTS[scheme])
    except (UsageError, KeyError):
        raise UsageError(
            f"expected {form} in {variable}, found {text!r:.200}; unset it to ask the cloud's own address"
        ) from None
    return f"{scheme}://{host}:{port}"


def watch_cloud(
    cloud: Cloud, leave: Callable[[str], None], report: Callable[[str], None], wait: Callable[[float], bool]
) -> None:
    """Ask until a notice comes, which calls `leave`, or `wait` says that it is over.

    wait: sleeps for some seconds, and is true, at once, when nothing is to be asked any more.
    """
    failures, has_answered, is_reported = 0, False, False
    while not wait(0.0):
        try:
            reason = cloud.ask()
        except NoAnswer as error:
            failures += 1
            if not is_reported and failures == (OUTAGE_ASKS if has_answered else 1):
                is_reported = True
                report(_outage(cloud, str(error), has_answered=has_answered))
        else:
            if is_reported:
                report(f"the metadata service of {cloud.name} at {cloud.url} answers now")
            failures, has_answered, is_reported = 0, True, False
            if reason is not None:
                if not wait(0.0):
                    leave(f"a notice of {cloud.name} ({reason}) asks this node to leave")
                return
        if wait(pause_s(failures)):
            return


def pause_s(failures: int) -> float:
    """Seconds before the next request after so many that failed in a row."""
    return min(EVERY_S * 2.0 ** min(failures, 10), LONGEST_PAUSE_S)


def _outage(cloud: Cloud, reason: str, *, has_answered: bool) -> str:
    what = "does not answer any more" if has_answered else "does not answer; is this one of its machines?"
    return (
        f"the metadata service of {cloud.name} at {cloud.url} {what} ({reason});"
        " until it does, no notice of it reaches this node; training goes on"
    )
