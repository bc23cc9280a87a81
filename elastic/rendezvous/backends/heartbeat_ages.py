"""How long ago each node sent its newest heartbeat, for a process outside the group.

Only the backends that keep heartbeats in files or objects show this: directory.py and
object_store.py. An age compares the storage's clock with the reader's, which may differ by seconds.
That is good enough to tell a person whether a run is alive; the group itself never compares clocks
(failure_detector.py).
"""

from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from elastic.rendezvous.backends.beat_files import FOLDER
from elastic.system.clock import file_time_s


def heartbeat_ages_s(url: str) -> dict[str, float]:
    """Seconds by node id; empty where no group keeps its state in this folder or at this URL.

    Raises StoreFailed when an object store does not answer.
    """
    changed = _of_objects(url) if "://" in url else _of_folder(Path(url))
    return {unquote(name): file_time_s() - changed_s for name, changed_s in changed.items()}


def _of_folder(folder: Path) -> dict[str, float]:
    changed = {}
    for path in (folder / FOLDER).glob("*"):
        with suppress(FileNotFoundError):  # removed since it was listed
            if not path.name.startswith("."):
                changed[path.name] = path.stat().st_mtime
    return changed


def _of_objects(url: str) -> dict[str, float]:
    from elastic.storage.remote import Objects  # starts a thread, which a folder does not need

    listed = Objects(url, limit_s=120.0).listed("beats")
    return {
        name.rpartition("/")[2]: each.changed for name, each in listed.items() if each.changed is not None
    }
