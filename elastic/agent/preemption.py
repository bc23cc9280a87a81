"""A notice that this machine will be taken away leads, within seconds, to the drain of a SIGTERM.

A file may appear, a command of the user's may exit with 0, and the metadata service of a cloud may
say so. Each source has a thread that asks it again and again, so that none delays training or
another. An existing file is a notice even if it is empty. That a source gives no answer is said
once, and it is asked again; nothing else happens.

A cloud is a row of a table: the request, and how the answer is read. Its service is asked
directly, at an address that only its machines reach: a proxy would ask the service of its own
machine. No redirect is followed. A time in an answer is only shown (docs/decisions/0023).
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Annotated, Any

from elastic.config.options import CloudName, Options
from elastic.system.clock import Clock
from elastic.system.untrusted import decode, fits, parse_json, pattern

# The shortest notice is of thirty seconds.
FILE_EVERY_S, CLOUD_EVERY_S, COMMAND_EVERY_S = 0.04, 2.0, 5.0
COMMAND_S = 10.0
ANSWER_S = 5.0  # of each wait for bytes
KILLED_WITHIN_S = 5.0  # of the context's end: a command that runs
ANSWER_LIMIT_BYTES = 1024 * 1024
ADDRESS = "169.254.169.254"  # of all three clouds
_NOT_RUN = (126, 127)  # what a shell exits with when it cannot run a command, or does not find it
_SHORT_TEXT = Annotated[str, pattern("[ -~]{1,200}", "a short text")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """ask: returns why this machine is taken away, None where it is not; raises where no usable
    answer came.
    """

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
    is_reported = False
    while True:
        try:
            if (reason := source.ask()) is not None:
                leave(f"a notice ({reason}) asks this node to leave")
                return
        # The edge of a thread: without a further try the node would train on, deaf to notices.
        except Exception as error:
            if not is_reported:
                why = f"{type(error).__name__}: {error}"
                report(
                    f"no notice of {source.name} can be heard ({why}); it is asked again, and training goes on"
                )
            is_reported = True
        if wait(source.every_s):
            return


def _ask_file(file: str) -> str | None:
    # Path.exists raises where the folder may not be read.
    return file if os.path.exists(file) else None  # noqa: PTH110


def _ask_command(command: str, is_over: threading.Event, clock: Clock) -> str | None:
    null = subprocess.DEVNULL
    words = ["/bin/sh", "-c", command]
    process = subprocess.Popen(words, stdin=null, stdout=null, stderr=null, start_new_session=True)
    deadline = clock.monotonic() + COMMAND_S
    try:
        while (code := process.poll()) is None:
            if clock.monotonic() > deadline:
                raise TimeoutError(f"it takes longer than {COMMAND_S:g} s")
            if is_over.wait(FILE_EVERY_S):
                return None
    finally:
        if process.poll() is None:  # with everything that it started
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code in _NOT_RUN:
        raise ValueError(f"it exits with {code}")
    return command if code == 0 else None


# The clouds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """variable: of the environment, names another address, for the clouds' own programs too.

    first: method, path and headers of a request whose short answer goes into the `{}` of the
    headers, and to `read`. read: given the answer as well, why this machine is taken away; None
    where it is not. none_status: how the service says that there is no notice, beside an answer.
    """

    name: str
    variable: str
    path: str
    headers: Mapping[str, str]
    read: Callable[[str, str], str | None]
    first: tuple[str, str, Mapping[str, str]] | None = None
    none_status: int | None = None

    def ask(self, host: str) -> str | None:
        first = ""
        if self.first is not None:
            status, first = _request(host, *self.first)
            if status != HTTPStatus.OK or not fits(first, _SHORT_TEXT):
                raise ValueError(f"HTTP {status} for {self.first[1]}")
        headers = {name: value.format(first) for name, value in self.headers.items()}
        status, text = _request(host, "GET", self.path, headers)
        if status == self.none_status:
            return None
        if status != HTTPStatus.OK:
            raise ValueError(f"HTTP {status}")
        reason = self.read(text, first)
        return None if reason is None else f"{self.name}: {reason}"


def cloud_source(name: CloudName, environ: Mapping[str, str]) -> Source:
    cloud = CLOUDS[name]
    host = environ.get(cloud.variable, "").strip().removeprefix("http://").strip("/") or ADDRESS
    named = f"the metadata service of {cloud.name} at {host}"
    return Source(name=named, ask=partial(cloud.ask, host), every_s=CLOUD_EVERY_S)


def _request(host: str, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """The status and the text of the answer."""
    with closing(HTTPConnection(host, timeout=ANSWER_S)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(ANSWER_LIMIT_BYTES + 1)
    if len(body) > ANSWER_LIMIT_BYTES:
        raise ValueError(f"an answer of more than {ANSWER_LIMIT_BYTES} bytes")
    return answer.status, body.decode(errors="replace").strip()


def _read_aws(text: str, _token: str) -> str | None:
    """Two minutes ahead. The recommendation to rebalance is no notice: the instance may live on."""
    found = parse_json(text)
    if not isinstance(found, dict) or not fits(found.get("action"), _SHORT_TEXT):
        raise ValueError(f"expected an action in spot/instance-action, found {text!r:.80}")
    return f"{found['action']} at {_shown(found.get('time')) or 'an unknown time'}"


def _read_gcp(text: str, _first: str) -> str | None:
    """Thirty seconds ahead."""
    if text.upper() not in ("TRUE", "FALSE"):
        raise ValueError(f"expected TRUE or FALSE in instance/preempted, found {text!r:.80}")
    return "preempted" if text.upper() == "TRUE" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureEvent:
    EventType: str
    Resources: tuple[str, ...]
    NotBefore: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureEvents:
    Events: tuple[AzureEvent, ...]


def _read_azure(text: str, machine: str) -> str | None:
    """An event of type Preempt or Terminate that names this VM, thirty seconds ahead. None is
    acknowledged, which would let the VM be taken before its last step is saved.
    """
    for event in decode(AzureEvents, text, what="scheduledevents", exact=False).Events:
        # Freeze, Reboot and Redeploy leave the VM where it is.
        is_here = machine.casefold() in map(str.casefold, event.Resources)
        if is_here and event.EventType in ("Preempt", "Terminate"):
            when = _shown(event.NotBefore)  # empty where it has begun
            return event.EventType + (f", not before {when}" if when else "")
    return None


def _shown(value: Any) -> str:
    return value if fits(value, _SHORT_TEXT) else ""


_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 - the name of a header
CLOUDS: dict[CloudName, Cloud] = {
    # IMDSv2, which every instance answers: each look has a new token.
    "aws": Cloud(
        name="AWS",
        variable="AWS_EC2_METADATA_SERVICE_ENDPOINT",
        first=("PUT", "/latest/api/token", {f"{_TOKEN}-ttl-seconds": "60"}),
        path="/latest/meta-data/spot/instance-action",
        headers={_TOKEN: "{}"},
        none_status=HTTPStatus.NOT_FOUND,
        read=_read_aws,
    ),
    "gcp": Cloud(
        name="Google Cloud",
        variable="GCE_METADATA_HOST",
        path="/computeMetadata/v1/instance/preempted",
        headers={"Metadata-Flavor": "Google"},
        read=_read_gcp,
    ),
    # The first request of a VM switches its events on; those of the next two minutes may get no
    # answer in time.
    "azure": Cloud(
        name="Azure",
        variable="AZURE_METADATA_SERVICE_ENDPOINT",
        first=(
            "GET",
            "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
            {"Metadata": "true"},
        ),
        path="/metadata/scheduledevents?api-version=2020-07-01",
        headers={"Metadata": "true"},
        read=_read_azure,
    ),
}
