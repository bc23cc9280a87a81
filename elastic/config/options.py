"""A command line becomes one valid value, or a UsageError: expected, found, what to do.

Whether the recipe exists and the fault plan makes sense is checked where they are read. Nothing
here reads files or the environment, prints or exits.
"""
# ruff: noqa: RUF009 - each default is a field of its own

import argparse
import difflib
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import PurePath
from typing import Any, Literal, NoReturn, TypeVar, get_args

from elastic.config.durations import Every, duration_s
from elastic.config.identity import Origin
from elastic.errors import UsageError
from elastic.system import stop_signals
from elastic.system.untrusted import ENDPOINT

T = TypeVar("T")
Backend = Literal["dir", "c10d", "etcd"]
Balance = Literal["auto", "off"]
Standby = Literal["auto", "on", "off"]
CloudName = Literal["aws", "gcp", "azure"]
# The part of `--help` that lists the options with their defaults.
OPTIONS_HELP = """\
the run:
  --run-dir URL            a folder that all nodes share, or an fsspec URL such as s3://bucket/run
                           [runs/<recipe name>]
  --fresh                  rename a used run directory (a folder, no URL) and start over
  --from RUN[@STEP][:NAME,...]
                           begin a new run directory from a committed state of another run: its
                           newest one, or that of STEP; all entries of its State, or these [none]
  --save-every WHEN        checkpoint every 500steps, 30s, 10min, 2h, or auto, by their cost [auto]
  --snapshot-every N       steps between snapshots, auto (for 1 % of the time), or off [auto]
  --snapshot-copies N      copies of each part of a sharded state in memory: 2 has one on another
                           node, 1 none [2]
  --audit N                steps between audits, in which another worker computes a shard of each
                           again, bit for bit; auto (for 1 % of the time), or off [auto]
  --rehearse N             steps between rehearsals, in which new workers do a step again, bit for
                           bit; auto (early, then rarely), or off [auto]
  --accept                 go on where a step done again differs, with what a restart computes
  --keep N                 number of checkpoints to keep, the newest ones [3]
  --balance HOW            auto: slow workers compute fewer shards (not yet on GPUs), with the same
                           result; off: all compute as many [auto]

nodes and workers:
  --min-nodes N            train while N nodes or more are there [1]
  --max-nodes N            let nodes join up to this number [1]
  --nproc-per-node N       workers on this node, or auto: one for each GPU, else one [auto]
  --standby WHEN           keep for each worker of this node a process that has run the script up to
                           run.steps and takes over after a fault: on, off, or auto, on CPUs where
                           that takes more than 2 s and memory is free [auto]
  --local-addr HOST        name or address at which other nodes reach this one [the address of the
                           interface in GLOO_SOCKET_IFNAME, else of the host name]

how nodes meet:
  --rdzv-backend WHERE     where nodes keep the state of their group: dir, a shared folder or an
                           object store; etcd, a cluster of version 3.4 or newer; c10d, a store on
                           one of the nodes [dir]
  --rdzv-endpoint ADDRESS  for dir, the folder or its URL (s3, gs, az) [rendezvous/ in the run
                           directory]; for etcd, its members as HOST[:PORT],..., after https:// for
                           TLS (certificates and user as for etcdctl: ETCDCTL_CACERT, ETCDCTL_CERT,
                           ETCDCTL_KEY, ETCDCTL_USER); for c10d, HOST[:PORT] of that node
  --rdzv-id ID             name of the group in etcd or c10d [a name kept in the run directory]
  --last-call S            at a start or resume, wait S seconds for more than --min-nodes [2]
  --join-window S          before nodes that come are let in, wait S seconds for more; 0 lets each
                           in at once [0.5]
  --keep-alive S           remove a node that is silent for S seconds [2; in an object store 15]
  --rdzv-timeout S         exit if --min-nodes, or the backend, are not there within S seconds [600]

how to watch:
  --http HOST:PORT         serve /metrics for Prometheus, and /healthz and /readyz, of this agent;
                           port 0 picks one and prints it [off]
  --tensorboard DIR        write the run's numbers into this folder for TensorBoard; needs
                           elastic-train[tensorboard] [off]

faults:
  --max-restarts N         fail after N restarts in a row that brought no new step [3]
  --grace S                seconds from SIGTERM, or from the signal or notice before it, to the end,
                           the last checkpoint included; a second Ctrl-C ends it at once [30]
  --hang-timeout S         replace a worker that makes no progress for S seconds; auto learns it of
                           the steps of the run, off waits for ever [auto]
  --drain-signals LIST     further signals that begin --grace: USR1, USR2 and HUP with commas, or
                           none; one that is left out ends the command at once [USR1,USR2,HUP]
  --notice CLOUD           leave as at SIGTERM once the metadata service of aws, gcp or azure says
                           that this machine is taken away [none]
  --notice-file PATH       leave as at SIGTERM once this file exists [none]
  --notice-command CMD     leave as at SIGTERM once this shell command, run every 5 s, exits with 0
                           [none]
  --faults PLAN            break things on purpose, such as "step 50 rank 1: kill" [none]"""
_ENDPOINTS = {
    "c10d": "the address of the node that is to keep the group's state, HOST[:PORT]",
    "etcd": "the members of the cluster, HOST[:PORT],HOST[:PORT],...",
}
# Protocols whose libraries can create an object only where there is none: of several nodes that
# create the same one, exactly one succeeds.
_EXCLUSIVE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
# A heartbeat every 3 s, and room for requests that fail or take long.
OBJECTS_KEEP_ALIVE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """host: a name or an address without brackets. port: 0 leaves the choice to the kernel."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> "ListenAddress":
        """Raises UsageError. It does not ask whether this machine has the address."""
        match = ENDPOINT.fullmatch(text)
        if match is None or int(match["port"] or 2**16) >= 2**16:
            raise UsageError(
                f"expected HOST:PORT such as 127.0.0.1:9100, [::1]:9100, or 0.0.0.0:9100 for all interfaces (port 0: any free one), found {text!r}"
            )
        return ListenAddress(host=match["host"].strip("[]"), port=int(match["port"]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def whole(lowest: int, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < lowest:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {lowest}, found {text!r}")
    return int(text)


def _workers(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else whole(1, text)


def _seconds(text: str) -> float:
    if (seconds := duration_s(text)) is None:
        raise argparse.ArgumentTypeError(f"expected seconds (30) or a duration (30s, 10min), found {text!r}")
    return seconds


def _copies(text: str) -> int:
    if text in ("1", "2"):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected 1 or 2, found {text!r}")


def _keep_alive(text: str) -> float:
    """Within it five heartbeats are sent, and each is waited for by all other nodes."""
    if 0.05 <= (seconds := _seconds(text)) <= 86_400:
        return seconds
    raise argparse.ArgumentTypeError(f"expected 0.05 s to a day, found {text!r}")


def _reader(read: Callable[[str], T]) -> Callable[[str], T]:
    """The function, whose UsageError argparse shows behind the name of the option."""

    def named(text: str) -> T:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return named


def _drain_signals(text: str) -> tuple[signal.Signals, ...]:
    names = [] if text == "none" else [word.strip().upper().removeprefix("SIG") for word in text.split(",")]
    if unknown := [name for name in names if name not in _WARNINGS]:
        also = " (it always asks for a drain)" if f"SIG{unknown[0]}" in _ALWAYS else ""
        raise argparse.ArgumentTypeError(
            f"expected names of {', '.join(_WARNINGS)} with commas between them, or none, found {unknown[0]!r}{also}"
        )
    return tuple(_WARNINGS[name] for name in dict.fromkeys(names))


_ALWAYS = [each.name for each in stop_signals.END]
_WARNINGS = {each.name.removeprefix("SIG"): each for each in stop_signals.WARNINGS}
listen_address = _reader(ListenAddress.parse)
state_of_run = _reader(Origin.parse)
_at_least_one = partial(whole, 1)
_save_every = partial(
    Every.parse, kinds=("steps", "seconds", "auto"), expected="500steps, 30s, 10min, 2h or auto"
)
_every_nth = partial(
    Every.parse, kinds=("steps", "auto", "off"), unit="steps", expected="a number of steps, auto or off"
)
_hang_timeout = partial(
    Every.parse,
    kinds=("seconds", "auto", "off"),
    unit="s",
    expected="seconds above 0, a duration (60s, 10min), auto or off",
)
_AUTO = Every(kind="auto")


def _option(default: Any, read: Callable[[str], object] = str, *, words: tuple[str, ...] = ()) -> Any:
    """A field of Options. read: raises UsageError or argparse.ArgumentTypeError. words: the only
    ones that it takes, which a shell completes.
    """
    return field(default=default, metadata={"read": _reader(read), "words": words or None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run a recipe: `elastic-train RECIPE [options] [-- recipe arguments]`.

    Each field after the first two is an option: its name without the unit (and without the `_` that
    keeps `from_` from being a keyword), its default and how it is read; a bool is a flag. For
    `rdzv_endpoint`, `rdzv_id` and `local_addr`, None leaves the choice to the agent.
    """

    recipe: str
    recipe_args: tuple[str, ...] = ()
    run_dir: str = _option(MISSING)
    fresh: bool = False
    from_: Origin | None = _option(None, Origin.parse)
    min_nodes: int = _option(1, _at_least_one)
    max_nodes: int = _option(1, _at_least_one)
    nproc_per_node: int | Literal["auto"] = _option("auto", _workers)
    rdzv_backend: Backend = _option("dir", words=get_args(Backend))
    rdzv_endpoint: str | None = _option(None)
    rdzv_id: str | None = _option(None)
    max_restarts: int = _option(3, partial(whole, 0))
    save_every: Every = _option(_AUTO, _save_every)
    keep: int = _option(3, _at_least_one)
    snapshot_every: Every = _option(_AUTO, _every_nth)
    snapshot_copies: int = _option(2, _copies)
    audit: Every = _option(_AUTO, _every_nth)
    rehearse: Every = _option(_AUTO, _every_nth)
    accept: bool = False
    balance: Balance = _option("auto", words=get_args(Balance))
    hang_timeout: Every = _option(_AUTO, _hang_timeout)
    grace_s: float = _option(30.0, _seconds)
    drain_signals: tuple[signal.Signals, ...] = _option(stop_signals.WARNINGS, _drain_signals)
    notice: CloudName | None = _option(None, words=get_args(CloudName))
    notice_file: str | None = _option(None)
    notice_command: str | None = _option(None)
    faults: str | None = _option(None)
    last_call_s: float = _option(2.0, _seconds)
    join_window_s: float = _option(0.5, _seconds)
    keep_alive_s: float = _option(2.0, _keep_alive)
    rdzv_timeout_s: float = _option(600.0, _seconds)
    standby: Standby = _option("auto", words=get_args(Standby))
    local_addr: str | None = _option(None)
    http: ListenAddress | None = _option(None, ListenAddress.parse)
    tensorboard: str | None = _option(None)

    @property
    def meeting_protocol(self) -> str:
        """The protocol of the URL where nodes meet; empty for a folder and for servers."""
        protocol, is_url, _ = (self.rdzv_endpoint or self.run_dir).partition("://")
        return protocol if self.rdzv_backend == "dir" and is_url and protocol != "file" else ""

    @property
    def meets_in_objects(self) -> bool:
        """Whether the group's state is kept in an object store."""
        return self.meeting_protocol in _EXCLUSIVE


# By field of Options.
FLAGS = {
    each.name: "--" + each.name.removesuffix("_s").rstrip("_").replace("_", "-")
    for each in fields(Options)[2:]
}


def parse(argv: Sequence[str]) -> Options:
    """Read a training command line. Raises UsageError.

    Options stand before or after RECIPE; words after `--` belong to the recipe.
    """
    ours, recipe_args = split_recipe_args(argv)
    found, rest = training_parser().parse_known_args(ours)
    recipe = only_recipe(rest)
    values = {"run_dir": f"runs/{PurePath(recipe).stem}"} | vars(found)
    options = Options(recipe=recipe, recipe_args=recipe_args, **values)
    if options.meets_in_objects and "keep_alive_s" not in values:
        options = replace(options, keep_alive_s=OBJECTS_KEEP_ALIVE_S)
    if options.min_nodes > options.max_nodes:
        raise UsageError(
            f"expected --min-nodes to be at most --max-nodes, found {options.min_nodes} and {options.max_nodes};"
            f" give --max-nodes {options.min_nodes} or more"
        )
    if options.rdzv_backend != "dir" and options.rdzv_endpoint is None:
        raise UsageError(
            f"expected --rdzv-endpoint with --rdzv-backend {options.rdzv_backend}, found none; give {_ENDPOINTS[options.rdzv_backend]}"
        )
    # With a run directory at such a URL, a node by itself keeps its group in a local folder.
    if options.meeting_protocol not in {"", *_EXCLUSIVE} and (options.rdzv_endpoint or options.max_nodes > 1):
        raise UsageError(
            f"expected a place where nodes can meet (a folder, or a URL of {', '.join(sorted(_EXCLUSIVE))}), found {options.meeting_protocol}://;"
            " give --rdzv-endpoint FOLDER, a folder that all nodes share, or --rdzv-backend etcd or c10d"
        )
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """`elastic-train check RECIPE [--steps N] [--json] [-- recipe arguments]`.

    steps: how many first steps are compared; None for as many as a few seconds allow.
    """

    recipe: str
    recipe_args: tuple[str, ...]
    steps: int | None
    as_json: bool


def asks_for(argv: Sequence[str], *flags: str) -> bool:
    """Whether one of `flags` stands before `--`, which begins the words of the recipe."""
    return any(word in flags for word in split_recipe_args(argv)[0])


class WordParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def training_parser() -> argparse.ArgumentParser:
    """A parser whose answer holds the options that were given, and no others."""
    parser = WordParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for each in fields(Options)[2:]:
        flag, of_value = FLAGS[each.name], each.metadata
        if of_value:
            parser.add_argument(flag, dest=each.name, type=of_value["read"], choices=of_value["words"])
        else:
            parser.add_argument(flag, dest=each.name, action="store_true")
    return parser


def split_recipe_args(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    cut = [*argv, "--"].index("--")
    return list(argv[:cut]), tuple(argv[cut + 1 :])


def only_recipe(rest: list[str]) -> str:
    for word in rest:
        if word.startswith("-"):
            raise UsageError(f"unknown option {word}; {_advice(word)}")
    if rest in ([], [""]):
        raise UsageError(
            "expected a recipe, found none; write elastic-train recipes/barlow.py (--help lists commands and options)"
        )
    recipe, *others = rest
    if others:
        raise UsageError(
            f"expected one recipe, or a command that --help names, found {' and '.join(rest)};"
            f" arguments of the recipe come after --: elastic-train {recipe} -- {' '.join(others)}"
        )
    return recipe


def _advice(word: str) -> str:
    close = difflib.get_close_matches(word.split("=", maxsplit=1)[0], FLAGS.values(), n=1, cutoff=0.75)
    if close:
        return f"did you mean {close[0]}?"
    return f"an option of the recipe comes after --: elastic-train RECIPE [options] -- {word}"
