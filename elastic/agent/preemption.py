"""A notice that this machine will be taken away leads, within seconds, to the drain of a SIGTERM.

A file may appear, a command of the user's may exit with 0, and the metadata service of a cloud may
say so. Each source has a thread that asks it again and again, so that none delays training or
another. An existing file is a notice even if it is empty. A source that gives no answer is reported
once and asked ever more rarely; nothing else happens.

A cloud is a row of a table: where its notices are asked for, and how the answer is read. Such a
service is asked directly, at an address that only its machines reach: a proxy would ask the service
of its own machine. No redirect is followed.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPMessage
from typing import Annotated, Any

from elastic.config.options import CloudName, Options
from elastic.system.clock import Clock
from elastic.system.untrusted import decode, fits, parse_json, pattern

FILE_EVERY_S, CLOUD_EVERY_S, COMMAND_EVERY_S = 0.04, 2.0, 5.0
LONGEST_PAUSE_S = 10.0  # the shortest notice is of thirty seconds
OUTAGE_ASKS = 3  # that fail in a row; one alone is no news where others were answered
COMMAND_S = 10.0
KILLED_WITHIN_S = 5.0  # of the context's end: a command that runs
ANSWER_LIMIT_BYTES = 1024 * 1024
ADDRESS = "169.254.169.254"  # of all three clouds
_NOT_RUN = (126, 127)  # what a shell exits with when it cannot run a command, or does not find it
_SHORT_TEXT = Annotated[str, pattern("[ -~]{1,200}", "a short text")]


class NoAnswer(Exception):  # noqa: N818 - it says what is wrong
    """No usable answer came, and the text says why: the source is asked again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """ask: returns why this machine is taken away, None where it is not; raises NoAnswer."""

    name: str
    ask: Callable[[], str | None]
    every_s: float


@contextmanager
def open_notices(
    options: Options,
    environ: Mapping[str, str],
    leave: Callable[[str], None],
    report: Callable[[str], None],
    clock: Clock,
) -> Iterator[None]:
    """While the context is open, a notice calls `leave` with its reason, from a thread."""
    is_over, threads = threading.Event(), []
    for source in sources(options, environ, is_over, clock):
        watched = source, leave, report, is_over.wait
        threads.append(threading.Thread(target=watch, args=watched, name=source.name, daemon=True))
        threads[-1].start()
    try:
        yield
    finally:
        is_over.set()
        if options.notice_command is not None:  # what holds the other threads ends with the process
            threads[-1].join(KILLED_WITHIN_S)


def sources(
    options: Options, environ: Mapping[str, str], is_over: threading.Event, clock: Clock
) -> list[Source]:
    """Those that the options name, the command last."""
    found = []
    if options.notice is not None:
        found.append(cloud_source(options.notice, environ))
    if (file := options.notice_file) is not None:
        found.append(Source(name=file, ask=partial(_ask_file, file), every_s=FILE_EVERY_S))
    if (command := options.notice_command) is not None:
        ask = partial(_ask_command, command, is_over, clock)
        found.append(Source(name=command, ask=ask, every_s=COMMAND_EVERY_S))
    return found


def watch(
    source: Source,
    leave: Callable[[str], None],
    report: Callable[[str], None],
    wait: Callable[[float], bool],
) -> None:
    """Ask until a notice comes, or `wait` says that it is over.

    wait: sleeps for some seconds, and is true, at once, when nothing is to be asked any more.
    """
    failures, has_answered, is_reported = 0, False, False
    while not wait(0.0):
        try:
            if (reason := source.ask()) is not None and not wait(0.0):
                leave(f"a notice ({reason}) asks this node to leave")
                return
        # The edge of a thread: without a further try the node would train on, deaf to notices.
        except Exception as error:
            failures += 1
            if not is_reported and failures == (OUTAGE_ASKS if has_answered else 1):
                is_reported = True
                why = str(error) if isinstance(error, NoAnswer) else repr(error)
                report(
                    f"no notice of {source.name} can be heard ({why}); it is asked again, and training goes on"
                )
        else:
            if is_reported:
                report(f"{source.name} answers now")
            failures, has_answered, is_reported = 0, True, False
        if wait(pause_s(source.every_s, failures)):
            return


def pause_s(every_s: float, failures: int) -> float:
    """Seconds before the next request after so many that failed in a row."""
    return max(every_s, min(every_s * 2.0 ** min(failures, 10), LONGEST_PAUSE_S))


def _ask_file(file: str) -> str | None:
    # Path.exists raises where the folder may not be read.
    return file if os.path.exists(file) else None  # noqa: PTH110


def _ask_command(command: str, is_over: threading.Event, clock: Clock) -> str | None:
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise NoAnswer(str(error)) from error
    deadline = clock.monotonic() + COMMAND_S
    try:
        while (code := process.poll()) is None:
            if clock.monotonic() > deadline:
                raise NoAnswer(f"it takes longer than {COMMAND_S:g} s")
            if is_over.wait(FILE_EVERY_S):
                return None
    finally:
        if process.poll() is None:  # with everything that it started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code in _NOT_RUN:
        raise NoAnswer(f"it exits with {code}")
    return command if code == 0 else None


# The clouds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    headers: HTTPMessage

    def text(self) -> str:
        """Raises NoAnswer, as `json_fields` does."""
        if self.status != HTTPStatus.OK:
            raise NoAnswer(f"HTTP {self.status}")
        return self.body.decode(errors="replace").strip()

    def json_fields(self) -> dict[str, Any]:
        try:
            found = parse_json(self.text())
        except ValueError as error:
            raise NoAnswer(f"an answer that is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise NoAnswer("an answer that is no JSON object")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """variable: of the environment, names another address, for the clouds' own programs too.

    read: given a function that requests a path, why this machine is taken away; None where it is
    not; raises NoAnswer. A time in an answer is only shown.
    """

    name: str
    variable: str
    read: Callable[[Callable[..., Answer]], str | None]
    headers: Mapping[str, str]
    answer_s: float = 5.0


def cloud_source(name: CloudName, environ: Mapping[str, str]) -> Source:
    cloud = CLOUDS[name]
    host = environ.get(cloud.variable, "").strip().removeprefix("http://").strip("/") or ADDRESS
    named = f"the metadata service of {cloud.name} at {host}"

    def ask() -> str | None:
        reason = cloud.read(partial(_request, host, cloud.headers, cloud.answer_s))
        return None if reason is None else f"{cloud.name}: {reason}"

    return Source(name=named, ask=ask, every_s=CLOUD_EVERY_S)


def _request(
    host: str,
    headers: Mapping[str, str],
    answer_s: float,
    path: str,
    more: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
) -> Answer:
    """Raises NoAnswer. The limit is on each wait for bytes."""
    connection = HTTPConnection(host, timeout=answer_s)
    try:
        connection.request(method, path, headers={**headers, **(more or {})})
        answer = connection.getresponse()
        body = answer.read(ANSWER_LIMIT_BYTES + 1)
    except (HTTPException, OSError, ValueError) as error:
        raise NoAnswer(
            f"no answer within {answer_s:g} s" if isinstance(error, TimeoutError) else str(error)
        ) from error
    finally:
        connection.close()
    if len(body) > ANSWER_LIMIT_BYTES:
        raise NoAnswer(f"an answer of more than {ANSWER_LIMIT_BYTES} bytes")
    return Answer(status=answer.status, body=body, headers=answer.headers)


def _read_aws(request: Callable[..., Answer]) -> str | None:
    """`spot/instance-action`, two minutes ahead. The recommendation to rebalance is no notice: the
    instance may live for days. IMDSv2, which every instance answers: each look has a new token.
    """
    try:
        token = request("/latest/api/token", {f"{_TOKEN}-ttl-seconds": "60"}, method="PUT").text()
    except NoAnswer as error:
        raise NoAnswer(
            f"{error}; is the service switched on, and for a container with a hop limit of 2?"
        ) from error
    if not fits(token, _SHORT_TEXT):
        raise NoAnswer("an answer that is no token")
    answer = request("/latest/meta-data/spot/instance-action", {_TOKEN: token})
    if answer.status == HTTPStatus.NOT_FOUND:
        return None
    found = answer.json_fields()
    action, time = found.get("action"), found.get("time")
    if not fits(action, _SHORT_TEXT):
        raise NoAnswer("expected an action in spot/instance-action, found none")
    return f"{action} at {time if fits(time, _SHORT_TEXT) else 'an unknown time'}"


def _read_gcp(request: Callable[..., Answer]) -> str | None:
    """`instance/preempted`, thirty seconds ahead (docs/decisions/0023)."""
    answer = request("/computeMetadata/v1/instance/preempted")
    if answer.headers.get("Metadata-Flavor") != "Google":
        raise NoAnswer(f"HTTP {answer.status} of a service that is not Google Cloud's")
    if (found := answer.text().upper()) not in ("TRUE", "FALSE"):
        raise NoAnswer(f"expected TRUE or FALSE in instance/preempted, found {found!r:.80}")
    return "preempted" if found == "TRUE" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureEvent:
    EventType: str
    Resources: tuple[str, ...]


def _read_azure(request: Callable[..., Answer]) -> str | None:
    """An event of type Preempt or Terminate that names this VM, thirty seconds ahead. None is
    acknowledged, which would let the VM be taken before its last step is saved. An event that
    cannot be read, perhaps of another VM, hides no notice, and is no answer.
    """
    machine = request("/metadata/instance/compute/name?api-version=2021-02-01&format=text").text()
    if not fits(machine, _SHORT_TEXT):
        raise NoAnswer("an answer that is no name of a VM")
    events = request("/metadata/scheduledevents?api-version=2020-07-01").json_fields().get("Events")
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


_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 - the name of a header
CLOUDS: dict[CloudName, Cloud] = {
    "aws": Cloud(name="AWS", variable="AWS_EC2_METADATA_SERVICE_ENDPOINT", read=_read_aws, headers={}),
    "gcp": Cloud(
        name="Google Cloud",
        variable="GCE_METADATA_HOST",
        read=_read_gcp,
        headers={"Metadata-Flavor": "Google"},
    ),
    # The first request of a VM switches its events on, which takes up to two minutes.
    "azure": Cloud(
        name="Azure",
        variable="AZURE_METADATA_SERVICE_ENDPOINT",
        read=_read_azure,
        headers={"Metadata": "true"},
        answer_s=130.0,
    ),
}
