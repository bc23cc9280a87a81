"""The memory of one rank's loop is put together here, and what it finds is said once in a run."""

from contextlib import suppress
from pathlib import Path

from elastic.config.parent import new_run_from
from elastic.data.record import DataRecord
from elastic.events import UnsavedVariables
from elastic.observe.log import read_rare
from elastic.system.clock import file_time_s
from elastic.train.body_changes import BodyChanges
from elastic.train.body_places import BodyPlaces
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.files_read import FilesRead
from elastic.train.given_data import GivenData
from elastic.train.left_behind import Leftovers
from elastic.train.loop_memory import LoopMemory
from elastic.train.loop_parts import LoopParts
from elastic.train.module_settings import PREFIX, ModuleSettings
from elastic.train.unsaved_sentences import sentence


def loop_memory(
    parts: LoopParts, last_step: int, resumed: DataRecord | None, leftovers: Leftovers
) -> LoopMemory:
    """That of a rank's loop; rank 0 records what is found, and says it.

    resumed: what stands beside the state that the loop begins with. leftovers: of the steps.
    """

    def report(found: UnsavedVariables) -> None:
        if parts.output is not None:
            known = _said_before(parts.output.events) if parts.generation > 1 else set[str]()
            parts.output.log.record(found)
            if not known.issuperset(_names(found)):
                print(sentence(found), flush=True)
        if parts.trace is not None:
            parts.trace.note(sentence(found))

    dataset, collate = parts.loader.dataset, parts.loader.collate
    settings = DatasetSettings(dataset=dataset, collate=collate)
    modules = ModuleSettings(state=parts.state)
    saved = {} if resumed is None else resumed.settings
    of_modules = {name: text for name, text in saved.items() if name.startswith(PREFIX)}
    new_run = new_run_from(parts.restorer.run_url)
    modules.put_back(of_modules, new_run)
    settings.put_back({name: text for name, text in saved.items() if name not in of_modules}, new_run)
    body = BodyChanges(
        state=parts.state,
        dataset=dataset,
        settings=modules,
        of_loading=settings.of_loading,
        collate=collate,
    )
    return LoopMemory(
        state=parts.state,
        last_step=last_step,
        left_out=[dataset],
        report=report,
        body=body,
        files=FilesRead(since_s=_began_s(parts)),
        settings=settings,
        modules=modules,
        places=BodyPlaces(parts.state, leftovers),
        workers=parts.loader.workers,
        given=GivenData({"dataset": dataset, "collate": collate, **parts.loader.chosen}),
    )


def _said_before(events: Path) -> set[str]:
    """The names that earlier processes of the run have said."""
    found = [each.event for each in read_rare(events, UnsavedVariables)]
    return {name for each in found for name in _names(each)}


def _names(found: UnsavedVariables) -> list[str]:
    return [*found.changing, *found.after_loop, *found.files, *found.by_loading]


def _began_s(parts: LoopParts) -> float:
    """The time of a file of the run's beginning; in an object store, of this process's."""
    if parts.output is not None:
        with suppress(OSError):
            return (parts.output.events.parent / "run.json").stat().st_mtime
    return file_time_s()
