"""What some calls of a function do to one place tells whether every worker would have the same.

That is decided by its contents alone: before, after a call, after the same once more, and after
that of another shard (side_effects.py says what is refused).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic.train.lasting import ABSENT, content_of
from elastic.train.side_effect_sentences import of_generator, of_memory, of_scratch, of_store
from elastic.train.site import BY_NUMBERS, WHOLE, Content, Form, Note, Site

_HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What a site held: before; after a call; after the same once more; after another shard's.

    other: from what was there before; None where there is one shard.
    """

    before: Content
    first: Content
    second: Content
    other: Content | None


def problem_of(site: Site, runs: Runs) -> str | None:
    """Why what the function does to this site cannot be exact; None if it can."""
    if site.form in (Form.TENSOR, Form.ARRAY):
        return _problem_of_numbers(site, runs)
    if site.form is Form.CACHE:  # what it holds is seen by its parts
        return None
    changed = []
    for key in dict.fromkeys([*runs.first, *runs.second, *runs.before]):
        before, first, second = (each.get(key, ABSENT) for each in (runs.before, runs.first, runs.second))
        if not (_is_same(before, first) and _is_same(first, second)):
            changed.append((key, before, first, second))
    for key, _, first, second in changed:
        if content_of(first) != content_of(second):
            name = site.name_of(key)
            return of_generator(name) if site.form is Form.GENERATOR else of_memory(name)
    if runs.other is None:
        return None
    for key, before, first, second in changed:
        other = runs.other.get(key, ABSENT)
        is_written_again = second is not first or isinstance(first, bool | int | float)
        if _is_container(site, is_written_again) and _is_same(before, other):
            return of_store(site.path)
    return None


def _is_container(site: Site, is_written_again: bool) -> bool:
    """Whose items each call writes.

    A dict that keeps those that it has is a cache. A set always keeps them.
    """
    return site.form is Form.SET or (site.form in (Form.MAPPING, Form.SEQUENCE) and is_written_again)


def _problem_of_numbers(site: Site, runs: Runs) -> str | None:
    """Of a tensor or an array that is changed in place."""
    before: Any
    first: Any
    before, first, second = (each.get(WHOLE) for each in (runs.before, runs.first, runs.second))
    if content_of(first) != content_of(second):
        return of_memory(site.path)
    if content_of(before) == content_of(first):
        return None
    if not site.is_of_module:
        is_whole = before.shape == first.shape and _share(first != before) >= _HALF
        return of_scratch(site.path) if is_whole else of_store(site.path)
    other: Any = None if runs.other is None else runs.other.get(WHOLE)
    if other is None or not before.shape == first.shape == other.shape:
        return None
    ours, theirs = first != before, other != before
    is_elsewhere = int((ours & theirs).sum()) < _HALF * int(ours.sum())
    return of_store(site.path) if is_elsewhere else None


def _share(changed: Any) -> float:
    """Of a tensor or an array of truth values, how many are true."""
    return float(changed.sum()) / max(changed.size if isinstance(changed, np.ndarray) else changed.numel(), 1)


def _is_same(one: Any, other: Any) -> bool:
    is_number = isinstance(one, bool | int | float | str) and type(one) is type(other)
    return one is other or (is_number and repr(one) == repr(other))


def _has_changed(site: Site, before: Content, after: Content) -> bool:
    if site.form in (Form.TENSOR, Form.ARRAY, Form.GENERATOR):
        return content_of(before.get(WHOLE)) != content_of(after.get(WHOLE))
    return before.keys() != after.keys() or not all(_is_same(before[key], after[key]) for key in before)


def changed_names(sites: list[Site], before: Note, after: Note) -> Iterator[str]:
    for site, was, now in zip(sites, before.contents, after.contents, strict=True):
        if _has_changed(site, was, now):
            is_whole = site.form in BY_NUMBERS
            changed = [] if is_whole else [key for key in now if not _is_same(was.get(key, ABSENT), now[key])]
            yield from map(site.name_of, changed or [WHOLE])
