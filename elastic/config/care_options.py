"""The command lines of what is done with runs that are there, and of the completion of them all.

Nothing here reads files or the environment, prints or exits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from elastic.config.options import WordParser
from elastic.config.parent import Origin
from elastic.errors import UsageError

RUNS, CLEAN, EXPORT, COMPLETION = "runs", "clean", "export", "completion"
CARE = (RUNS, CLEAN, EXPORT, COMPLETION)
SHELLS = ("bash", "zsh")
DEFAULT_FOLDER = "runs"
DEFAULT_ENTRY = "model"
EXPORT_FORM = "RUN[@STEP]"
SUFFIXES = (".safetensors", ".pth", ".pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOptions:
    """`elastic-train runs [FOLDER] [--json]`; folder: or a URL."""

    folder: str
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """`elastic-train clean RUN [--yes] [--json]`."""

    run: str
    yes: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """`elastic-train export RUN[@STEP] FILE [--entry NAME] [--overwrite]`."""

    origin: Origin
    file: str
    entry: str
    overwrite: bool


def parse_runs(words: Sequence[str]) -> RunsOptions:
    """Here and below: the words behind the command. Raises UsageError."""
    flags, _, rest = _read(RUNS, words, flags=("--json",))
    if len(rest) > 1:
        raise UsageError(
            f"runs takes one folder or URL, found {len(rest)}; write elastic-train runs {rest[0]}"
        )
    return RunsOptions(folder=rest[0] if rest else DEFAULT_FOLDER, as_json=flags["--json"])


def parse_clean(words: Sequence[str]) -> CleanOptions:
    flags, _, rest = _read(CLEAN, words, flags=("--yes", "--json"))
    if len(rest) != 1:
        raise UsageError(
            f"clean needs 1 run directory, found {len(rest)}; write elastic-train clean runs/NAME"
        )
    return CleanOptions(run=rest[0], yes=flags["--yes"], as_json=flags["--json"])


def parse_export(words: Sequence[str]) -> ExportOptions:
    flags, entry, rest = _read(EXPORT, words, flags=("--overwrite",), value="--entry")
    if len(rest) != 2:
        raise UsageError(
            f"export needs a run and a file, found {' and '.join(rest) or 'none'}; write elastic-train export runs/NAME model.safetensors"
        )
    run, file = rest
    if PurePath(file).suffix not in SUFFIXES or "://" in file:
        raise UsageError(
            f"expected a local FILE that ends in {', '.join(SUFFIXES)}, which says its format, found {file!r}"
        )
    origin = Origin.parse(run)
    if origin.entries:
        raise UsageError(
            f"export takes {EXPORT_FORM}, found {run!r}; name what to export with --entry {origin.entries[0]}"
        )
    if entry == "":
        raise UsageError("expected the name of an entry of State after --entry, found none")
    return ExportOptions(
        origin=origin, file=file, entry=entry or DEFAULT_ENTRY, overwrite=flags["--overwrite"]
    )


def parse_completion(words: Sequence[str]) -> str:
    """The shell."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(
            f"completion takes the name of a shell, {' or '.join(SHELLS)}, found {' '.join(words) or 'none'};"
            ' write eval "$(elastic-train completion bash)" in ~/.bashrc'
        )
    return words[0]


def _read(
    command: str, words: Sequence[str], *, flags: Sequence[str], value: str | None = None
) -> tuple[dict[str, bool], str | None, list[str]]:
    """(each flag, whether it was given; what the option `value` was given; the other words)."""
    parser = WordParser(add_help=False, allow_abbrev=False)
    for flag in flags:
        parser.add_argument(flag, action="store_true", dest=flag)
    if value is not None:
        parser.add_argument(value, dest=value)
    known, rest = parser.parse_known_args(list(words))
    options = [*flags, *([value] if value else [])]
    if unknown := [word for word in rest if word.startswith("-")]:
        raise UsageError(f"{command} knows {' and '.join(options)} and no other option, found {unknown[0]}")
    found = vars(known)
    return {flag: bool(found[flag]) for flag in flags}, found.get(value) if value else None, rest
