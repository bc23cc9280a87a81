"""What a user reads of what the loop changes and no object of the State saves: a note or a refusal.

It says what was found, why the run could not be exact, and what to write instead.
"""

import re

from elastic.events import UnsavedVariables
from elastic.train.object_marks import Kind, Mark

MANY_NAMES = 4  # on a line of the console, the events have all
MANY_PARTS = 2  # of one object

_ADVICE: dict[Kind | str, str] = {
    Kind.RANDOM: "draw from the global generators of torch, NumPy or Python, which every step sets, or make the generator in "
    "each step from its number, as np.random.default_rng((seed, step.number))",
    Kind.ITERATOR: "an iterator cannot be saved: give the data to run.data, or take by the step what belongs to it, as "
    "dataset[step.number % len(dataset)]",
    Kind.ARRAY: "keep it in elastic.Values(name=array), which goes into the State (Values holds a copy: change values.name); make it in each step before it is read; or "
    "compute it from step.number",
    Kind.TENSOR: "give it to the State in elastic.Values(name=tensor) (Values holds a copy: change values.name), or in a registered buffer of a module there; make it in "
    "each step before it is read; or compute it from step.number",
    "in an iterator": "a generator's variables cannot be saved: keep the number in elastic.Values(name=number), which goes into the State, or compute it from "
    "step.number",
    "library": "replace it before the loop, as every process does then; or, for some calls alone, put it back in the same step",
    "weights": "keep weights in a copy of the model that goes into the State, as kept = copy.deepcopy(model) with State(..., kept=kept) and "
    "kept.load_state_dict(model.state_dict()); a mean of former weights in torch.optim.swa_utils.AveragedModel there; masks in elastic.Values(masks=...), "
    "which holds a copy: change values.masks",
    "optimizer": "keep it in optimizer.state[parameter], which an optimizer's state_dict saves",
    "left out": "let the state_dict of its module give it, and its load_state_dict put it back",
    "buffer": "register the buffer with persistent=True",
    "attribute": "make it a buffer, by self.register_buffer, and update it in the loop",
    "values": "give these Values to the State, State(..., values=values)",
    "schedule": "give it state_dict and load_state_dict, and put it into the State, or compute the rate from step.number",
}


def sentence(found: UnsavedVariables) -> str:
    """One line for the console."""
    parts = []
    if found.changing:
        is_one = len(found.changing) == 1
        it, it_begins = ("it", "it begins") if is_one else ("them", "they begin")
        more = "; elastic-train report lists all of them" if _is_cut(found.changing) else ""
        parts.append(
            f"no object of the State saves {_listed(found.changing)}, which the loop changes: after a restart {it_begins} again as at the top"
            f" of the script. Where the result depends on {it}, keep {it} in elastic.Values(...), which goes into the State, or derive {it} from"
            f" step.number; what is only shown may stay{more}"
        )
    if found.after_loop:
        it = "it" if len(found.after_loop) == 1 else "them"
        parts.append(
            f"the script reads {_listed(found.after_loop)} after the loop, which sets {it}: a process that resumes after the last step that"
            f" sets {it} does not have that value. Keep {it} in elastic.Values(...), or compute {it} after the loop"
        )
    if found.files:
        parts.append(
            f"a step reads the file {_first(found.files, MANY_NAMES)}, which an earlier step has written: a process that goes on from an earlier state finds there"
            " what a later step wrote. Keep the contents in elastic.Values(...), which goes into the State, or give the file of each step a name of its own"
        )
    if found.by_loading:
        it = "it" if len(found.by_loading) == 1 else "them"
        parts.append(
            f"loading samples changes {_listed(found.by_loading)}, in each process by the samples that it loads itself, and from the start again after a restart. Where a sample depends"
            f" on {it}, the result is another one then, and at another number of workers: let a sample depend on its index, and on elastic.Values, which the loop sets; what is"
            " only shown, or tells which file is open, may stay"
        )
    if found.unreadable:
        it = "it is" if len(found.unreadable) == 1 else "they are"
        parts.append(
            f"{_listed(found.unreadable)} cannot be looked at, because an error is raised where {it} asked: what the loop changes there, and no object of the State saves, is"
            " neither refused nor named"
        )
    return f"note: {'. And '.join(parts)}"


def refusal(found: dict[str, Mark], since: str, until: str) -> str:
    """found: all that one look found, by path. since, until: where a look was taken."""
    advised: dict[str, list[str]] = {}
    for path, mark in found.items():
        advised.setdefault(_advice(path, mark), []).append(path)
    (advice, *_), is_one = advised, len(advised) == 1
    what_to_do = advice if is_one else "; ".join(f"{_listed(advised[each])}: {each}" for each in advised)
    was, it, is_ = ("was", "it", "it is") if len(found) == 1 else ("were", "them", "they are")
    return (
        f"{_listed([*found])} {was} changed between {since} and {until}, and no object of the State saves {it}. A process that "
        f"restarts runs the script from its top, where {is_} as at the start, so that the run would end with another result: {what_to_do}"
    )


def _advice(path: str, mark: Mark) -> str:
    if mark.entry and mark.owner not in ("buffer", "attribute"):
        return f"let the state_dict of {mark.entry} give it, and its load_state_dict put it back"
    if mark.owner == "module":
        owner = re.match(r"(?:self\.)?(\w+)", path)
        name = "module" if owner is None else owner.group(1)
        return (
            f"give {name} to the State as well, State(..., {name}={'self.' * path.startswith('self.')}{name})"
        )
    if mark.owner == "iterator" and mark.kind is Kind.PLAIN:
        return _ADVICE["in an iterator"]
    if mark.kind in (Kind.RANDOM, Kind.ITERATOR):
        return _ADVICE[mark.kind]
    if mark.kind is Kind.TENSOR and re.search(r"\['\w+(\.\w+)+'\]$", path):  # a key as of a state_dict
        return _ADVICE["weights"]
    return _ADVICE.get(mark.owner) or _ADVICE.get(mark.kind) or _ADVICE[Kind.TENSOR]


def _is_cut(names: list[str]) -> bool:
    return re.search(r"\d more", _listed(names)) is not None


def _listed(names: list[str]) -> str:
    """Names for a sentence; several parts of one object as one name."""
    parts: dict[str, list[str]] = {}
    for name in names:
        found = re.match(r"(?:self\.)?\w+", name)
        parts.setdefault(name if found is None else found.group(), []).append(name)
    words = []
    for owner, (first, *others) in parts.items():
        more = _first([_part(each[len(owner) :]) for each in others], MANY_PARTS)
        words.append(f"{first} (and {more})" if others else first)
    return _first(words, MANY_NAMES)


def _part(name: str) -> str:
    """A variable of a generator is called ` (its total)`."""
    return name.strip().removeprefix("(").removesuffix(")") if name.startswith(" (") else name


def _first(words: list[str], limit: int) -> str:
    if len(words) > limit + 1:  # else the last would be longer as a number
        words = [*words[:limit], f"{len(words) - limit} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
