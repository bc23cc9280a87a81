"""What a load must give back, in a form that stays true when the tensors themselves change.

A trial load (trial_load.py) writes into the very tensors that it loads from. So what they hold is
noted before: the checksum of each entry, the form of each tensor, and which of them share memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elastic.snapshot.image import dense_strides
from elastic.train.state.document import entries_of
from elastic.train.state.shared_memory import ties


@dataclass(frozen=True, slots=True, kw_only=True)
class StateContents:
    """Of a state: its document, the checksums of its entries, the forms of its tensors in words.

    strides: of tensors that are not row-major. ties: of tensors whose sharing of memory counts, the
    first name of the memory.
    """

    document: Any
    checksums: Mapping[str, str]
    forms: Mapping[str, str]
    strides: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]


def contents(
    document: Any, checksums: Mapping[str, str], tensors: Mapping[str, Tensor], shares: frozenset[str]
) -> StateContents:
    """shares: the objects whose tensors must share the memory that they shared."""
    found = {name: dense_strides(each.shape, each.stride()) for name, each in tensors.items()}
    return StateContents(
        document=document,
        checksums=checksums,
        forms={name: _form(each) for name, each in tensors.items()},
        strides={name: strides for name, strides in found.items() if strides is not None},
        ties=ties({name: each for name, each in tensors.items() if name.split(".")[0] in shares}),
    )


def difference(saved: StateContents, found: StateContents, *, is_exact: bool) -> str:
    """The first entry that differs, as a phrase that says how; "" where none does.

    is_exact: strides and shared memory count too.
    """
    before, now = saved.checksums, found.checksums
    different = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if not different and is_exact:
        names = sorted(saved.strides.keys() | found.strides.keys())
        different = [name for name in names if saved.strides.get(name) != found.strides.get(name)]
    if different:
        return _in_words(different[0], saved, found)
    return _torn(saved.ties, found.ties) if is_exact else ""


def _in_words(entry: str, saved: StateContents, found: StateContents) -> str:
    name = entry.removesuffix(" (values)")
    if name != entry:
        return _first_difference(name, saved.document.get(name), found.document.get(name))
    before, now = (each.forms.get(entry, "no tensor") for each in (saved, found))
    return f"{entry}: other numbers" if before == now else f"{entry}: saved {before}; now {now}"


def _torn(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    for name in sorted(before.keys() | now.keys()):
        was, is_now = before.get(name), now.get(name)
        if was != is_now and was is not None:
            return f"{name}: it shared the memory of {was}, and does not any more"
        if was != is_now:
            return f"{name}: it had memory of its own, and shares that of {is_now} now"
    return ""


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"


def _first_difference(path: str, one: Any, other: Any) -> str:
    """Where two values of a document differ first."""
    before, now = entries_of(one), entries_of(other)
    if before is not None and now is not None:
        names, its_names = [name for name, _ in before], [name for name, _ in now]
        if names != its_names:
            gone, new = (
                sorted({*some} - {*others}) for some, others in ((names, its_names), (its_names, names))
            )
            if gone or new:
                return f"{path}: saved with the keys {gone!r:.60} and without {new!r:.60}, which it has now"
            return f"{path}: saved with the keys {names!r:.100}; now {its_names!r:.100}"
        if _are_reordered(one, other):
            return (
                f"{path}: the same elements in another order, as a set has that a load makes again: give sorted(...) of it in its state_dict, "
                "or keep a list or dict.fromkeys(...) in the place of the set"
            )
        for (name, each), (_, its) in zip(before, now, strict=True):
            if each != its:
                return _first_difference(f"{path}.{name}", each, its)
    return f"{path}: saved {json.dumps(one):.80}; now {json.dumps(other):.80}"


def reordered(path: str, one: Any, other: Any) -> str:
    """The path of the first list or dict that has the same elements in another order, if any."""
    before, now = entries_of(one), entries_of(other)
    if before is None or now is None or one == other:
        return ""
    if _are_reordered(one, other):
        return path
    pairs = zip(before, now, strict=False)
    found = (reordered(f"{path}.{name}", each, its) for (name, each), (_, its) in pairs)
    return next(filter(None, found), "")


def _are_reordered(one: Any, other: Any) -> bool:
    """Of two values that `entries_of` takes."""
    if one == other or one.keys() != other.keys():
        return False
    contents, others = (sorted(json.dumps(each) for each in next(iter(v.values()))) for v in (one, other))
    return contents == others
