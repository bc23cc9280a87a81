"""The page of a run, or of two, made of the files in its folder and written as one file."""

from contextlib import closing
from pathlib import Path

from elastic.config.output_file import refuse_own
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.rendezvous.backends.heartbeat_ages import heartbeat_ages_s
from elastic.report.begun_with import parent_of
from elastic.report.compare_runs import compare_runs
from elastic.report.facts import report_facts
from elastic.report.picture.page import page
from elastic.report.picture.picture import MOST_BYTES, Comparison, Picture, ReadRun, comparison, picture
from elastic.report.picture.series import MOST_POINTS
from elastic.report.report import summarise
from elastic.report.run_reader import RunReader, status_now
from elastic.system.files import open_regular, replace_whole
from elastic.system.untrusted import printable

_BEGIN = b'<!doctype html>\n<html lang="en" data-mode="'  # of each page


def draw(run: RunDir, reader: RunReader | None = None, most_bytes: int = MOST_BYTES) -> Picture:
    """reader: of this run, where it was drawn before. most_bytes: of the document.

    Raises OSError, and StoreFailed where the heartbeats are in a store that does not answer.
    """
    if reader is None:
        with closing(RunReader(run)) as own:
            return draw(run, own, most_bytes)
    found = reader.read()
    state, now = status_now(run, found.events, found.newest, heartbeat_ages_s(run.rendezvous_url))
    now_s = now if state.state == "running" else None
    report = summarise(found.events, found.trained, parent_of(run), now_s)
    read = ReadRun(
        name=run.url,
        events=found.events,
        trained=found.trained,
        series=found.series,
        report=report,
        status=state,
        now_s=now_s,
        facts=report_facts(report),
    )
    return picture(read, most_bytes)


def draw_pair(a: RunDir, b: RunDir) -> Comparison:
    """Raises as `draw`."""
    with (
        closing(RunReader(a, most_points=MOST_POINTS // 2)) as reader_a,
        closing(RunReader(b, most_points=MOST_POINTS // 2)) as reader_b,
    ):
        return comparison(
            compare_runs(a, b), draw(a, reader_a, MOST_BYTES // 2), draw(b, reader_b, MOST_BYTES // 2)
        )


def write_page(shown: Picture | Comparison, text: str) -> str:
    """Write the page to the file that `text` names, and say so.

    Raises UsageError, also for a file with another content: a recipe would be lost.
    """
    path, data = Path(text), page(shown).encode()
    try:
        refuse_own(path)
        if _holds_other(path):
            raise UsageError(
                f"expected a new file behind --html, or a page of before, found that {path} holds something else; take another name"
            )
        # What is no file of its own, such as /dev/stdout, stays what it is.
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)
        else:
            replace_whole(path, data, fsync=False)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(
            f"expected a file behind --html that can be written, found: {found} ({path}); give another one"
        ) from error
    return f"{printable(text)}: {len(data) / 1000:.0f} kB; open it in a browser"


def _holds_other(path: Path) -> bool:
    """Whether a file is there that is neither a page nor empty. Raises OSError."""
    if not path.is_file():
        return False
    with open_regular(path, follow=True) as file:
        return file.read(len(_BEGIN)) not in (b"", _BEGIN)
