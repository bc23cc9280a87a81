"""A machine that its cloud takes away leaves within seconds of the notice; else nothing happens.

A service that does not answer is reported once, and asked again ever more rarely, as long as the
node trains.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from elastic.agent.clouds.metadata import NoAnswer
from elastic.agent.clouds.services import CLOUDS, Cloud
from elastic.config.options import CloudName
from elastic.errors import UsageError
from elastic.system.addresses import split_endpoint

EVERY_S = 2.0
# No longer: the shortest notice is of thirty seconds.
LONGEST_PAUSE_S = 10.0
OUTAGE_ASKS = 3  # that fail in a row; one alone is no news where others were answered


def open_cloud(name: CloudName, environ: Mapping[str, str]) -> Cloud:
    """At the address that the environment names, or the cloud's own.

    Raises UsageError for an address in the environment that is none.
    """
    cloud = CLOUDS[name]
    text = environ.get(cloud.variable, "").strip()
    if not text:
        return cloud
    form, url = ("HOST[:PORT]", f"http://{text}") if name == "gcp" else ("http://HOST[:PORT]", text)
    try:
        scheme, _, rest = url.rstrip("/").partition("://")
        if scheme != "http":
            raise UsageError(url)
        host, port = split_endpoint(rest, 80)
    except UsageError:
        raise UsageError(
            f"expected {form} in {cloud.variable}, found {text!r:.200}; unset it to ask the cloud's own address"
        ) from None
    return replace(cloud, url=f"http://{host}:{port}")


def watch_cloud(
    cloud: Cloud, leave: Callable[[str], None], report: Callable[[str], None], wait: Callable[[float], bool]
) -> None:
    """Ask until a notice comes, which calls `leave`, or `wait` says that it is over.

    wait: sleeps for some seconds, and is true, at once, when nothing is to be asked any more.
    """
    failures, has_answered, is_reported = 0, False, False
    while not wait(0.0):
        try:
            reason = cloud.ask(cloud.url, None if has_answered else cloud.first_answer_s)
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
        " until it does, a notice may not reach this node; training goes on"
    )
