"""What the recipe's functions read beside the State is the same in every generation.

A teacher whose weights come from a file, class weights, a fixed projection: each process makes them
for itself, and a file may have been overwritten since the last process read it. So checksums of
them are saved beside each state. Later generations compare theirs at the first calls of each
function, and the ranks of a generation compare theirs at the end of its first step.

Looked at is what the functions of a step can reach (reachable.py) when they are first called, has a
stable name (stable_names.py), and is in no object of the State. Parameters and persistent buffers
of modules count at once. Other tensors and arrays may have been made by the loop, so they count
from a later step on, if they were there in the first one and are unchanged. (loop_memory.py looks
at what the loop makes or changes.) Checksums are sums of words: one pass over the memory.

Numbers that the functions read (number_inputs.py) are saved as well. One that is another in a later
process is named and not refused: it may be of that process alone, or only be shown.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn

from elastic.errors import UsageError
from elastic.train.callables import code_key
from elastic.train.flat_state import sha256_of
from elastic.train.number_inputs import NumberInputs, numbers_among, numbers_read
from elastic.train.object_marks import leaves, storage_of
from elastic.train.process_groups import ProcessGroups
from elastic.train.reachable import sites_below
from elastic.train.site import Form, Site
from elastic.train.stable_names import StableNames, below
from elastic.train.state import State

SEVERAL = ""  # in place of a checksum: a name that stood for different contents is not compared
LOOKS = 4  # at the calls of one function in a generation
FEW_TENSORS = 8  # of a module that have a checksum each; of a larger one, neighbours share one
MANY_NAMES = 32
_MANY_SAID = 4

Named = dict[str, list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What a name stood for at a first look."""

    step: int
    mark: object
    sha256: str
    thing: ReferenceType[Any] | None

    def is_of_another(self, thing: Any) -> bool:
        """Whether another object is there, perhaps in the memory of the former one."""
        return self.thing is not None and self.thing() is not thing


class FrozenInputs:
    """Of one process. left_out: objects that others compare, such as the dataset.

    new_run: the command that begins one from the state of this one.
    """

    def __init__(self, state: State, left_out: list[Any], new_run: str) -> None:
        self._new_run = new_run
        self._state = state
        self._left_out = left_out
        self._names: StableNames | None = None
        self._looks: Counter[object] = Counter()
        self._marks: dict[str, _Mark] = {}
        self._found: dict[str, str] = {}
        self._restored: dict[str, str] = {}
        self._first_step = 0
        self._restored_numbers: Mapping[str, str] = {}
        self._numbers = NumberInputs()

    def resume(self, there: Mapping[str, str], numbers: Mapping[str, str]) -> None:
        """there, numbers: `saved` and `numbers`, beside the state that the loop begins with."""
        self._restored, self._restored_numbers = dict(there), numbers

    def begin(self, step: int, frame: FrameType | None, own_numbers: frozenset[int] = frozenset()) -> None:
        """Before the body of a generation's first step, below the frame that iterates.

        own_numbers: the process id, the rank and the number of workers, which are no settings of a
        recipe that has them in a variable.
        """
        self._numbers = NumberInputs(self._restored_numbers, own_numbers)
        self._first_step = step
        self._names = StableNames.of_loop(frame)

    def look(self, step: int, function: Callable[..., Any], frame: FrameType | None) -> None:
        """Before the calls of a pass. frame: of the call of mean_loss or sum, or below it.

        Raises UsageError for what is another one than beside the restored state.
        """
        code = code_key(function)
        if self._names is None or self._looks[code] >= LOOKS:
            return
        self._looks[code] += 1
        if step == self._first_step:
            self._numbers.note(numbers_read(function, self._names.of_loop_names()))
        saved, known = self._saved_storages(), len(self._marks)
        seen = set[int]()
        roots, loop = self._names.roots(function, frame)
        left_out = [*self._left_out, *self._state.objects.values()]
        left_out = [each for each in left_out if not isinstance(each, nn.Module)]
        for root, thing in sorted(roots.items()):
            sites = sites_below(self._state, root, thing, left_out)
            named = below(root, sites, loop)
            kept = [(name, site) for name, site in named if self._is_kept(site, saved, seen)]
            self._note(step, kept, sites)
        if step > self._first_step and len(self._marks) == known:
            self._looks[code] = LOOKS  # it reads nothing new

    def look_at_loading(self, functions: Iterable[Callable[..., Any]], built: Mapping[str, Any]) -> None:
        """In a generation's first step. built: what the dataset was built with, by name."""
        assert self._names is not None
        loop_names = self._names.of_loop_names()
        for function in functions:
            self._numbers.note(numbers_read(function, loop_names))
        self._numbers.note(numbers_among(built))

    def compare_ranks(self, step: int, groups: ProcessGroups) -> list[str]:
        """In a generation's first step, with the other ranks. Raises UsageError on all of them.

        Returns the numbers that are others than before, which rank 0 has said.
        """
        if step != self._first_step:
            return []
        gathered = groups.all_gather((self._found, self._numbers.message()))
        others = self._numbers.compare([numbers for _, numbers in gathered])
        if groups.rank == 0 and others:
            print(_note(others, self._new_run), flush=True)
        _compare_checksums(step, [checksums for checksums, _ in gathered])
        return others

    def saved(self) -> dict[str, str]:
        """A checksum by name."""
        several = {name: SEVERAL for name, sha256 in self._restored.items() if sha256 == SEVERAL}
        return dict(sorted((self._restored | self._found | several).items())[:MANY_NAMES])

    def numbers(self) -> dict[str, str]:
        """As text by name: NumberInputs.saved."""
        return self._numbers.saved()

    def _saved_storages(self) -> set[int]:
        states = [leaves(thing.state_dict()) for thing in self._state.objects.values()]
        tensors = (each for state in states for _, each in state if isinstance(each, Tensor))
        return {storage_of(tensor) for tensor in tensors}

    def _is_kept(self, site: Site, saved: set[int], seen: set[int]) -> bool:
        """Whether it counts here: dense numbers that no State saves and no other name stood for."""
        thing = site.thing
        if site.form not in (Form.TENSOR, Form.ARRAY) or id(thing) in seen:
            return False
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            return not thing.is_meta and not thing.is_quantized and storage_of(thing) not in (0, *saved)
        return bool(thing.dtype.kind in "biufc")

    def _note(self, step: int, kept: list[tuple[str, Site]], sites: list[Site]) -> None:
        of_modules, others = dict[str, Named](), []
        held = dict(_of_modules(sites))
        for name, site in kept:
            if (owner := held.get(id(site.thing))) is not None:
                of_modules.setdefault(owner, {})[name] = [site.thing]
            else:
                others.append((name, site.thing))
        for tensors in of_modules.values():
            for name, part in _grouped(tensors).items():
                mark = [(each.data_ptr(), each._version) for each in part]  # noqa: SLF001
                self._add(step, name, mark, partial(sha256_of, part), at_once=True)
        for name, thing in others:
            self._add(step, name, _mark_of(thing), partial(sha256_of, [thing]), thing, at_once=False)

    def _add(
        self,
        step: int,
        name: str,
        mark: object,
        sha256: Callable[[], str],
        thing: Any = None,
        *,
        at_once: bool,
    ) -> None:
        """thing: which one it is counts too; None of a module, whose tensors have fixed places."""
        known = self._marks.get(name)
        if known is None:
            held = None if thing is None else ref(thing)
            known = self._marks[name] = _Mark(step=step, mark=mark, sha256=sha256(), thing=held)
            counts = at_once
        elif known.mark != mark or known.is_of_another(thing):
            # Of what appears later ranks would say either, where a new value equals the former one.
            if name in self._found or known.step == self._first_step:
                self._found[name] = SEVERAL
            return
        else:
            # What appears later was made in the loop, by each rank of its own shards, perhaps.
            counts = step > known.step == self._first_step and name not in self._found
        if counts:
            self._found[name] = known.sha256
            there = self._restored.get(name, SEVERAL)
            if there not in (SEVERAL, known.sha256):
                raise UsageError(
                    f"step {step}: {_shown(name)} has other contents than when this run first read it, and no object of the State saves it. The function "
                    "given to step.mean_loss or step.sum can read it, so that the run would end with another result. To resume, give it its former contents. "
                    f"{_advice(name)}. To go on with the new contents, begin a run from this state: {self._new_run}"
                )


def _compare_checksums(step: int, of_ranks: list[dict[str, str]]) -> None:
    for rank, checksums in enumerate(of_ranks):
        for name, sha256 in checksums.items():
            first = of_ranks[0].get(name, SEVERAL)
            if SEVERAL not in (first, sha256) and first != sha256:
                raise UsageError(
                    f"step {step}: {_shown(name)}, which no object of the State saves, is another one on rank {rank} than on rank 0, and the function "
                    f"given to step.mean_loss or step.sum can read it. Make it alike in every process. {_advice(name)}"
                )


def _note(found: list[str], new_run: str) -> str:
    more = f", and {len(found) - _MANY_SAID} more" if len(found) > _MANY_SAID else ""
    return (
        f"note: a function of the step, or code that loads samples, reads other numbers than before this restart: {', '.join(found[:_MANY_SAID])}{more}. If "
        "they count in the loss, the run ends with another result. To resume it, give them their former values; to go on with the new ones, begin a run "
        f"from this state: {new_run}"
    )


def _advice(name: str) -> str:
    root = _shown(name).partition(".")[0].partition("[")[0]
    return f"Put it into the State, as State(..., {root}=...), or read it from a file that never changes"


def _shown(name: str) -> str:
    return name.rpartition(": ")[2]


def _of_modules(sites: list[Site]) -> Iterator[tuple[int, str]]:
    """The ids of parameters and persistent buffers, each with the path of the outermost module."""
    outermost: list[str] = []
    for site in sites:
        if site.form is not Form.NAMES or "_parameters" not in site.thing:
            continue
        owner = next((each for each in outermost if site.path.startswith(f"{each}.")), None)
        if owner is None:
            outermost.append(owner := site.path)
        lost = site.thing.get("_non_persistent_buffers_set", ())
        buffers = {name: each for name, each in site.thing["_buffers"].items() if name not in lost}
        for tensor in (*site.thing["_parameters"].values(), *buffers.values()):
            if tensor is not None:
                yield id(tensor), owner


def _grouped(tensors: Named) -> Named:
    """By one name each, or from one name to another."""
    names = list(tensors)
    size = -(-len(names) // FEW_TENSORS)
    found: Named = {}
    for start in range(0, len(names), size):
        part = names[start : start + size]
        name = part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}"
        found[name] = [each for one in part for each in tensors[one]]
    return found


def _mark_of(thing: Any) -> object:
    """Changes where the contents do. A write by NumPy has no count."""
    if isinstance(thing, Tensor):
        return thing.data_ptr(), thing._version, sha256_of([thing])  # noqa: SLF001
    return sha256_of([thing])
