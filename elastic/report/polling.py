"""How often a run is looked at, so that the training on the same machine does not notice.

It does not know what else the machine does: the share holds for one reader.
"""

from pathlib import Path

_PAUSE_PER_COST = 200.0  # so that looking takes a two-hundredth of one core
_LONGEST_S = 60.0  # of a run in a folder, whose first look is the longest by far


def pause_s(cost_s: float, *, least_s: float, is_remote: bool) -> float:
    """Until the next look. cost_s: seconds that the last one took; of a run at a URL these are
    mostly those of the network, and it is read whole each time.
    """
    if is_remote:
        return max(least_s, 20 * cost_s)
    return max(least_s, min(_LONGEST_S, _PAUSE_PER_COST * cost_s))


def folder_id(folder: Path) -> tuple[int, int] | None:
    """The folder that has this name now; None for none.

    After `--fresh` it is another one, which a reader should not show a minute late.
    """
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
