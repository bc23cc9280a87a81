"""A command on a run that has ended well trains nothing, and says how to go on from it.

It reads what the run directory says, and changes nothing. How many steps the recipe asks for now is
not known here: only its workers find out, and none is started.
"""

from contextlib import suppress

from elastic.agent.claim_run_dir import check_claim
from elastic.agent.settings import Settings
from elastic.checkpoint import stop_record
from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.record import missing_text
from elastic.checkpoint.stop_record import StopRecord
from elastic.config import identity
from elastic.config.parent import new_run_from
from elastic.config.run_dir import RunDir
from elastic.errors import ElasticError, NothingLoads, StoreFailed
from elastic.events import RunFinished, RunStarted
from elastic.observe import logged_event
from elastic.observe.log import read_events, read_rare
from elastic.observe.logged_event import LoggedEvent
from elastic.storage.remote import open_store
from elastic.storage.store import read_small
from elastic.system.clock import SystemClock


def read_stop(settings: Settings) -> StopRecord | None:
    """Where the recipe ended this run early; None if it did not, or if the storage does not say."""
    with suppress(ElasticError):
        return stop_record.read(open_store(settings.run.url), settings.run_id, SystemClock())
    return None


def has_trained_nothing(settings: Settings) -> bool:
    """Whether a recipe with this library ended well and took no step: the same command runs again.

    A run in an object store counts as trained: the events of its nodes may be elsewhere.
    """
    run = settings.run
    if run.is_remote or not settings.imports_library:
        return False
    with suppress(ElasticError, OSError):
        records, damages = list_commits(open_store(run.checkpoints_url), SystemClock())
        return not records and not damages and logged_event.last(read_events(run.events), RunStarted) is None
    return False


def has_recorded_end(run: RunDir) -> bool:
    """Whether a node has written down here that the run is complete, which it stays."""
    with suppress(OSError):
        return bool(read_rare(run.events, RunFinished))
    return False


def is_complete(settings: Settings) -> bool:
    """Whether the run directory says so. Raises UsageError where it has become another run's, and
    StoreFailed. Of plain scripts only the group's state tells which command has ended.
    """
    if not settings.imports_library or not has_recorded_end(settings.run):
        return False
    check_claim(settings.run, settings.declared, settings.uid, SystemClock())
    return True


def _recorded_end(run: RunDir) -> LoggedEvent[RunFinished] | None:
    with suppress(OSError):
        return logged_event.last(read_events(run.events), RunFinished)
    return None


def check_finished(settings: Settings, committed_step: int) -> None:
    """Raises NothingLoads where the group has committed a newer step than the storage has.

    The run directory may be an old copy, from which another run would go on as if it were whole.
    """
    with suppress(StoreFailed):
        records, damages = list_commits(open_store(settings.run.checkpoints_url), SystemClock())
        # As in restore_order.py: what takes the place of the newest one is a damaged one.
        ours = [each for each in records if each.run_id == settings.run_id or each.step == committed_step]
        steps = [record.step for record in ours] + [damage.step for damage in damages]
        newest = max(steps, default=0)
        if newest < committed_step:
            raise NothingLoads(missing_text(committed_step, newest, settings.run.url))


def finished_text(settings: Settings) -> str:
    run, recipe, stopped = settings.run, settings.options.recipe, read_stop(settings)
    if not settings.imports_library:
        return (
            f"this command has ended well in {run.url}; elastic-train report {run.url} shows it. Nothing was started:"
            " the script starts again with other arguments, or with another --run-dir"
        )
    finished = _recorded_end(run)
    length = "" if finished is None else f": {finished.event.steps} steps ({finished.event.epochs} epochs)"
    how = f"finished{length}"
    if stopped is not None:
        how = f"finished: it was {stopped}"
    if _is_edited(settings):
        how += f"; {recipe} was edited since it began"
    return (
        f"the run in {run.url} is {how}; elastic-train report {run.url} shows it. Nothing was trained, whatever length the recipe"
        f" asks for now: for more steps or other settings begin a run from its state:"
        f" {new_run_from(run.url, recipe)}; another --run-dir begins a new one"
    )


def _is_edited(settings: Settings) -> bool:
    with suppress(ElasticError):
        there = read_small(open_store(settings.run.url), identity.NAME, SystemClock())
        if there is not None and settings.declared is not None:
            return identity.parse(there).recipe_sha256 != settings.declared.recipe_sha256
    return False
