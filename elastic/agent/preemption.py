"""A notice that this machine will be taken away leads, within seconds, to the drain of a SIGTERM.

A file may appear, a command of the user's may exit with 0, and the metadata service of a cloud may
say so. Each source has a thread that asks it again and again, so that none delays training or
another. An existing file is a notice even if it is empty. That a source gives no answer is said
once, and it is asked again; nothing else happens.

A cloud is a row of a table: its name, its address, and a function that looks. Its service is asked
directly, at an address that only its machines reach: a proxy would ask the service of its own
machine. A time in an answer is only shown (docs/decisions/0023).
"""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from elastic.config import environment
from elastic.config.options import CloudName, Options
from elastic.system.untrusted import parse_json

# The shortest notice is of thirty seconds.
FILE_EVERY_S, CLOUD_EVERY_S, COMMAND_EVERY_S = 0.04, 2.0, 5.0
COMMAND_S = 10.0
ANSWER_S = 5.0  # of each wait for bytes
ANSWER_LIMIT_BYTES = 1024 * 1024
ADDRESS = "169.254.169.254"  # of all three clouds
_NOT_RUN = (126, 127)  # what a shell exits with when it cannot run a command, or does not find it
_KILLED = 128 + signal.SIGKILL
_DIRECTLY = build_opener(ProxyHandler({}))  # not by a proxy of the environment
_SHORT_TEXT = re.compile(r"[ -~]{1,200}")


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
    options: Options, leave: Callable[[str], None], report: Callable[[str], None]
) -> Iterator[None]:
    """While the context is open, a notice calls `leave` with its reason, from a thread."""
    is_over = threading.Event()
    for source in sources(options):
        watched = source, leave, report, is_over.wait
        threading.Thread(target=watch, args=watched, name=source.name, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def sources(options: Options) -> list[Source]:
    """Those that the options name."""
    found = []
    if options.notice is not None:
        found.append(cloud_source(options.notice, environment.variables()))
    if (file := options.notice_file) is not None:
        found.append(Source(name=file, ask=partial(_ask_file, file), every_s=FILE_EVERY_S))
    if (command := options.notice_command) is not None:
        found.append(Source(name=command, ask=partial(_ask_command, command), every_s=COMMAND_EVERY_S))
    return found


def watch(
    source: Source, leave: Callable[[str], None], report: Callable[[str], None], wait: Callable[[float], bool]
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


def _ask_command(command: str) -> str | None:
    # timeout kills all that the command started, also where this process has died.
    words = ["timeout", "--signal=KILL", f"{COMMAND_S:g}", "/bin/sh", "-c", command]
    null = subprocess.DEVNULL
    code = subprocess.run(words, stdin=null, stdout=null, stderr=null, check=False).returncode
    if code in (_KILLED, -signal.SIGKILL):
        raise TimeoutError(f"it takes longer than {COMMAND_S:g} s")
    if code in _NOT_RUN:
        raise ValueError(f"it exits with {code}")
    return command if code == 0 else None


# The clouds.


def cloud_source(name: CloudName, environ: Mapping[str, str]) -> Source:
    title, variable, ask = CLOUDS[name]
    # The variable names another address, for the clouds' own programs too.
    host = environ.get(variable, "").strip().removeprefix("http://").strip("/") or ADDRESS

    def asked() -> str | None:
        reason = ask(host)
        return None if reason is None else f"{title}: {reason}"

    return Source(name=f"the metadata service of {title} at {host}", ask=asked, every_s=CLOUD_EVERY_S)


def _answer(host: str, path: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    """Raises HTTPError for another status than 200, and OSError."""
    request = Request(f"http://{host}{path}", headers=dict(headers), method=method)
    with _DIRECTLY.open(request, timeout=ANSWER_S) as answer:
        return str(answer.read(ANSWER_LIMIT_BYTES), errors="replace").strip()


def _short(text: str) -> str:
    if not _SHORT_TEXT.fullmatch(text):
        raise ValueError(f"expected a short text, found {text!r:.80}")
    return text


def _ask_aws(host: str) -> str | None:
    """Two minutes ahead. The recommendation to rebalance is no notice: the instance may live on."""
    # IMDSv2, which every instance answers: each look has a new token.
    header, lifetime = "X-aws-ec2-metadata-token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _short(_answer(host, "/latest/api/token", lifetime, method="PUT"))
    try:
        text = _answer(host, "/latest/meta-data/spot/instance-action", {header: token})
    except HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            return None
        raise
    found = parse_json(text)
    return f"{_short(found['action'])} at {found.get('time', 'an unknown time')}"


def _ask_gcp(host: str) -> str | None:
    """Thirty seconds ahead."""
    text = _answer(host, "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if text.upper() not in ("TRUE", "FALSE"):
        raise ValueError(f"expected TRUE or FALSE in instance/preempted, found {text!r:.80}")
    return "preempted" if text.upper() == "TRUE" else None


def _ask_azure(host: str) -> str | None:
    """An event of type Preempt or Terminate that names this VM, thirty seconds ahead. None is
    acknowledged, which would let the VM be taken before its last step is saved.

    The first request of a VM switches its events on; those of the next two minutes may get no
    answer in time.
    """
    headers, name = {"Metadata": "true"}, "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    machine = _short(_answer(host, name, headers)).casefold()
    text = _answer(host, "/metadata/scheduledevents?api-version=2020-07-01", headers)
    for event in parse_json(text)["Events"]:
        # Freeze, Reboot and Redeploy leave the VM where it is.
        is_here, kind = machine in map(str.casefold, event["Resources"]), event["EventType"]
        if is_here and kind in ("Preempt", "Terminate"):
            when = event.get("NotBefore")  # empty where it has begun
            return f"{kind}, not before {when}" if when else str(kind)
    return None


# The title, the variable of an environment that names its address, and the look.
CLOUDS: dict[CloudName, tuple[str, str, Callable[[str], str | None]]] = {
    "aws": ("AWS", "AWS_EC2_METADATA_SERVICE_ENDPOINT", _ask_aws),
    "gcp": ("Google Cloud", "GCE_METADATA_HOST", _ask_gcp),
    "azure": ("Azure", "AZURE_METADATA_SERVICE_ENDPOINT", _ask_azure),
}
