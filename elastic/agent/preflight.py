"""Nothing is written before the command, the recipe and the run directory were checked.

Three checks, cheapest first. `check_command` sees what the command line alone shows; it needs
neither torch nor a process. `declared_identity` runs the recipe in a process of its own up to
`elastic.start`, which writes down the identity of the run and ends the process. So a recipe that
does not import, a wrong argument or a broken machine ends here, with exit code 2, and a node that
was given other arguments never joins. `check_run_dir` compares that identity with the run
directory, and finds the state that --from names. A script that does not import this library is not
run twice: nothing is known of it but its text.
"""

import ast
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

from elastic.agent.run_directory import rendezvous_config
from elastic.agent.worker_process import Spawner
from elastic.checkpoint.find_parent import parent_of
from elastic.config import environment, identity
from elastic.config.identity import Identity
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, CannotStart, StoreFailed, UsageError
from elastic.events import NodeScheduled
from elastic.faults import plan
from elastic.storage.remote import check_url, open_store
from elastic.storage.store import read_small
from elastic.system.addresses import listen_on, node_address
from elastic.system.clock import SystemClock
from elastic.system.control_page import MAX_WORKERS
from elastic.system.files import scratch_folder
from elastic.system.untrusted import printable
from elastic.system.worker_protocol import StartRequest

PREFLIGHT_S, LOOK_S = 600.0, 1.0
_CLOCK = SystemClock()
_STDERR = 2


def imported_first(recipe: Path) -> tuple[str, ...] | None:
    """The modules that the script imports outside functions and branches, and what
    `run.fully_shard` does, without those of its own folder; None where it imports `elastic`
    nowhere. Raises UsageError when it is not Python.
    """
    try:
        tree = ast.parse(recipe.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(
            f"expected a recipe, found no file {recipe}; give the path of a Python script"
        ) from error
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"expected a Python script in {recipe}, found something else: {error}") from error
    if "elastic" not in {name.partition(".")[0] for name in _imported(ast.walk(tree))}:
        return None
    own = [str(recipe.resolve().parent)]
    names = [*_imported(tree.body)]
    if any(isinstance(node, ast.Attribute) and node.attr == "fully_shard" for node in ast.walk(tree)):
        names.append("torch.distributed.fsdp")  # by run.fully_shard, which takes over a second
    return tuple(name for name in names if PathFinder.find_spec(name.partition(".")[0], own) is None)


def _imported(statements: Iterable[ast.AST]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            yield statement.module or ""


def check_command(options: Options) -> None:
    """Raises UsageError for a command that is wrong by itself; writes nothing."""
    nproc = None if options.nproc_per_node == "auto" else options.nproc_per_node
    if nproc is not None and nproc > MAX_WORKERS:
        raise UsageError(f"expected at most {MAX_WORKERS} workers a node, found --nproc-per-node {nproc}")
    plan.parse(options.faults or "")
    job = NodeScheduled.by_slurm(environment.variables())
    if options.fresh and job is not None and job.restarts:  # it gives its first command again, to resume
        raise UsageError(
            f"expected no --fresh in a job that Slurm has requeued, found SLURM_RESTART_COUNT {job.restarts}: the run would begin again"
            " at each requeue; submit the job without --fresh, and for a new run with another --run-dir"
        )
    run = RunDir.parse(options.run_dir)
    if options.fresh and (run.is_remote or run.local.is_symlink()):
        raise UsageError(
            f"expected a folder with --fresh, which renames it at once, found {run.url}; take another --run-dir"
        )
    config = rendezvous_config(options, run, None)
    config.check(environment.variables())
    address_of(options)
    if options.meets_in_objects:
        check_url(config.endpoint)
    if options.from_ is not None:
        check_url(options.from_.run_dir.checkpoints_url)
    check_url(run.checkpoints_url)  # an unknown protocol, or one whose extra is not installed


def address_of(options: Options) -> str:
    """The address at which other nodes reach this one.

    Raises UsageError when no socket can listen for it.
    """
    address = options.local_addr or node_address(environment.variables())
    try:
        with listen_on(address) as listening:
            where = listening.getsockname()[0]
    except (OSError, UnicodeError) as error:  # the second for a name that no host can have
        raise UsageError(
            f"expected an address that the other nodes reach, found {address!r} ({error}); correct --local-addr"
        ) from error
    # Debian's /etc/hosts gives 127.0.1.1 for a machine's own name; the others resolve it otherwise.
    if options.max_nodes > 1 and where.startswith("127.") and address not in (where, "localhost"):
        raise UsageError(
            f"expected an address that the other nodes reach, found that {address!r} is {where} here; give --local-addr as a number"
        )
    return address


def check_recipe(options: Options, run: RunDir, nproc: int, spawner: Spawner) -> tuple[Identity | None, bool]:
    """(what the recipe declares, None for a script without the library; whether the run begins).

    Says what protects such a script. Raises UsageError for --from with one, and as
    `declared_identity` and `check_run_dir`.
    """
    recipe = Path(options.recipe)
    if imported_first(recipe) is None:
        if options.from_ is not None:
            raise UsageError(
                f"expected a recipe that imports elastic, found --from with {recipe}, whose state is its own responsibility"
            )
        print(
            f"{printable(options.recipe)} does not import elastic: it runs as under torchrun. Only restarts protect it, and it resumes from what it saves itself",
            flush=True,
        )
        return None, options.fresh
    return check_run_dir(options, declared_identity(spawner, recipe, options.recipe_args), run, nproc)


def declared_identity(
    spawner: Spawner, recipe: Path, arguments: tuple[str, ...], *, is_second: bool = False
) -> Identity:
    """The identity of the run that the recipe declares by calling `elastic.start`.

    is_second: what the recipe imports was preloaded for it, as for workers.

    Raises UsageError when the recipe fails before that; SystemExit(0) when it ends well without, as
    `-- --help` does; CannotStart where it is killed (SIGKILL, as where memory is short).
    """
    with scratch_folder("preflight-") as folder, tempfile.TemporaryFile() as out:
        answer = folder / identity.NAME
        env = environment.variables() | {environment.PREFLIGHT: str(answer)}
        sys.stderr.flush()
        request = StartRequest(command=(str(recipe), *arguments), env=env)
        child = spawner.start(request, out.fileno(), _STDERR)
        until_s = _CLOCK.monotonic() + PREFLIGHT_S
        try:
            while (code := child.poll()) is None and _CLOCK.monotonic() < until_s:
                spawner.wait(LOOK_S)
        finally:
            child.kill()
        if code is None:
            raise UsageError(
                f"{recipe} did not reach elastic.start within {PREFLIGHT_S:.0f} s; call it before loading data"
            )
        told, reason = (answer.with_suffix(each) for each in (environment.MODULES, environment.SPAWN))
        modules = tuple(told.read_text().splitlines()) if told.exists() else ()
        if reason.exists():
            # Packages may change variables when they are imported, as scikit-learn does. Workers
            # that inherit them see no change: only a second preflight tells it from the recipe's.
            may_inherit = modules and not is_second
            spawner.preload(modules if may_inherit else None)
            if not may_inherit:
                spawner.say_why(reason.read_text())
            return declared_identity(spawner, recipe, arguments, is_second=True)
        if answer.exists():
            if modules:
                spawner.preload(modules)
            return identity.parse(answer.read_bytes())
        out.seek(0)
        sys.stdout.buffer.write(out.read())
        sys.stdout.flush()
        if code == -signal.SIGKILL:
            raise CannotStart(f"{recipe} was killed before it had reached elastic.start; is memory short?")
        if code == EXIT_COMPLETE:
            raise SystemExit(EXIT_COMPLETE)
        raise UsageError(
            f"{recipe} ended with exit code {code} in elastic.start or before it; its words are above"
        )


def check_run_dir(options: Options, declared: Identity, run: RunDir, nproc: int) -> tuple[Identity, bool]:
    """(what the recipe declared, with the run's parent; whether the run directory holds no run).

    Raises UsageError when it holds another run, cannot be read, --from names no state, or
    --min-nodes nodes like this one have more workers than the run has shards.
    """
    if options.min_nodes * nproc > declared.shards:
        raise UsageError(
            f"expected at most as many workers as shards ({declared.shards}), found {options.min_nodes} nodes of {nproc} workers; "
            "lower --min-nodes or --nproc-per-node, or begin a run with more shards"
        )
    if options.max_nodes * nproc > declared.shards:
        print(
            f"{declared.shards} shards: {declared.shards // nproc} of the nodes train, with {nproc} workers each; more are spares"
        )
    found = None if options.fresh else _found(run)
    declared = replace(declared, parent=parent_of(found, options.from_, run, _CLOCK, print))
    if found is not None:
        identity.check(found, declared, run.url)
    return declared, found is None


def _found(run: RunDir) -> Identity | None:
    """The identity of the run in the directory. Raises UsageError."""
    try:
        there = read_small(open_store(run.url), identity.NAME, _CLOCK)
    except StoreFailed as error:
        raise UsageError(f"expected to read {run.url}/{identity.NAME}, found: {error}") from error
    return None if there is None else identity.parse(there)
