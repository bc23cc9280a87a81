"""The first call of a function is made again, and tells what the function leaves behind.

Twice for the same shard, and once for another one, each from what was there before; the cases are
those of side_effects.py. Afterwards everything is put back, as if the function had been called for
the training alone.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elastic.data.loader import Batch
from elastic.errors import UsageError
from elastic.train import structure
from elastic.train.audit import Auditor, Call, Compute
from elastic.train.lasting import ABSENT, Parts, content_of, differing, moved, parts_of, unchanged
from elastic.train.left_place import LeftPlace
from elastic.train.left_sentences import of_other_call, of_own_call
from elastic.train.object_marks import storage_of
from elastic.train.reachable import sites_of
from elastic.train.side_effect_sentences import of_initialisation, of_memory, of_weights
from elastic.train.site import BY_NUMBERS, COPIED_BYTES, WHOLE, Content, Form, Note, note, put_back
from elastic.train.site_changes import Runs, changed_names, problem_of

_Place = tuple[int, Any]  # the number of a site, and a key there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """After a call: what the sites hold, and the parts of what they did not hold before.

    result: a checksum of what the call returned.
    """

    contents: list[Content]
    parts: dict[_Place, Parts]
    result: str


class FirstCall:
    """What a function could change was read; the training calls it now for one of its shards.

    known: what former looks have found to be changed and allowed; new names are added.
    many_others: shards that earlier calls are made for, to see whether this one depends on them.
    """

    def __init__(
        self,
        auditor: Auditor,
        function: Callable[..., Any],
        earlier: list[Call],
        known: set[str],
        *,
        many_others: int,
    ) -> None:
        self._auditor = auditor
        self._earlier = earlier
        self._known = known
        self._many_others = many_others
        self._sites = sites_of(auditor.state, [function])
        self._before = self._note()

    def end(self, step: int, call: Call, shard: int, compute: Compute) -> list[LeftPlace]:
        """The call is over. Raises UsageError for what it leaves behind, or has found.

        Returns the places whose contents are of one shard, and are replaced by each call.
        """
        self._check_left_behind(step, call, shard, compute)
        after = self._note()
        changed = set(changed_names(self._sites, self._before, after))
        if changed <= self._known:
            return []
        self._known |= changed
        loader = self._auditor.loader
        others = [each for each in range(loader.order.shards) if each != shard]
        # Loaded before anything is called: a data set may count, or fill a cache, as it is loaded.
        same, again = loader.shard(step, shard), loader.shard(step, shard)
        other = loader.shard(step, others[0]) if others else None
        with self._auditor.undisturbed():
            put_back(self._sites, self._before)
            first, second = self._call(call, same, compute), self._call(call, again, compute)
            kept = {
                place: unchanged(parts, second.parts.get(place, {})) for place, parts in first.parts.items()
            }
            later = moved_first = None
            if any(kept.values()):
                later = self._moved(call, loader.shard(step, (others or [shard])[0]), compute)
                put_back(self._sites, self._before)
                moved_first = self._moved(call, loader.shard(step, shard), compute)
            put_back(self._sites, self._before)
            third = None if other is None else self._call(call, other, compute)
            put_back(self._sites, self._before)
            if any(site.form is Form.CACHE for site in self._sites):
                # It can be emptied, and is filled again by a call alone.
                compute(call, loader.shard(step, shard))
            put_back(self._sites, after)
        for problem in self._problems(first, second, third):
            raise UsageError(f"step {step}: {problem}")
        if later is not None:
            kept = {place: unchanged(parts, later.parts.get(place, {})) for place, parts in kept.items()}
            for problem in self._lasting(kept, third, moved_first):
                raise UsageError(f"step {step}: {problem}")
        if first.result != second.result:
            raise UsageError(f"step {step}: {of_own_call(sorted(changed))}")
        return [] if third is None else [*self._of_one_shard(first, second, third)]

    def _check_left_behind(self, step: int, call: Call, shard: int, compute: Compute) -> None:
        """All shards of an earlier call come first, so that it leaves what is of its last one.

        The call is made after earlier ones of its own shard, and of a few others: an accuracy may
        be the same for two of them.
        """
        loader = self._auditor.loader
        others = [each for each in range(loader.order.shards) if each != shard]
        if not self._earlier or not others:
            return
        sites = sites_of(self._auditor.state, [call.function, *(each.function for each in self._earlier)])
        now = note(sites, copied_bytes=COPIED_BYTES)
        left, results = list[str](), list[str]()
        with self._auditor.undisturbed():
            for of_earlier in (shard, *others[: self._many_others]):
                for each in self._earlier:
                    compute(each, loader.shard(step, of_earlier))
                found = note(sites, copied_bytes=COPIED_BYTES)
                left += changed_names(sites, now, found)
                results.append(content_of(compute(call, loader.shard(step, shard))) if left else "")
                put_back(sites, now)
                if not left or len(set(results)) > 1:
                    break
        if len(set(results)) > 1:
            raise UsageError(f"step {step}: {of_other_call(sorted(set(left)))}")

    def _problems(self, first: _Seen, second: _Seen, third: _Seen | None) -> Iterator[str]:
        """Of what the calls change each time, or write to places of their own."""
        for index, site in enumerate(self._sites):
            runs = Runs(
                before=self._before.contents[index],
                first=first.contents[index],
                second=second.contents[index],
                other=None if third is None else third.contents[index],
            )
            problem = problem_of(site, runs)
            if problem is not None:
                yield problem
        for place, parts in first.parts.items():
            site, now = self._sites[place[0]], second.parts.get(place, {})
            for path in dict.fromkeys([*parts, *now]) if site.form is not Form.CACHE else ():
                if path not in parts or path not in now or parts[path].content != now[path].content:
                    yield of_memory(site.name_of(place[1]) + path)

    def _lasting(
        self, kept: dict[_Place, Parts], other: _Seen | None, moved_first: _Seen | None
    ) -> Iterator[str]:
        """Of what each later call finds as the first one made it."""
        for place, parts in kept.items():
            name = self._sites[place[0]].name_of(place[1])
            first_of_moved = {} if moved_first is None else moved_first.parts.get(place, {})
            first_of_other = {} if other is None else other.parts.get(place, {})
            if differing(parts, first_of_moved, floats_only=False):
                yield of_weights(name)
            if differing(parts, first_of_other, floats_only=True):
                yield of_initialisation(name)

    def _of_one_shard(self, first: _Seen, second: _Seen, other: _Seen) -> Iterator[LeftPlace]:
        for (index, key), parts in first.parts.items():
            again, theirs = second.parts.get((index, key), {}), other.parts.get((index, key), {})
            replaced = [
                path
                for path, part in parts.items()
                if path in theirs
                and theirs[path].content != part.content
                and not (isinstance(part.thing, Tensor) and path in again and again[path].thing is part.thing)
            ]
            tensors = frozenset(path for path in replaced if isinstance(parts[path].thing, Tensor))
            if replaced:
                has_numbers = len(tensors) < len(replaced)
                yield LeftPlace(site=self._sites[index], key=key, paths=tensors, has_numbers=has_numbers)

        for site, ours, others in zip(self._sites, first.contents, other.contents, strict=True):
            is_written = site.form in (Form.TENSOR, Form.ARRAY)
            if is_written and content_of(ours.get(WHOLE)) != content_of(others.get(WHOLE)):
                yield LeftPlace(site=site, key=WHOLE, paths=frozenset(), has_numbers=True)

    def _call(self, call: Call, batch: Batch, compute: Compute) -> _Seen:
        result = content_of(compute(call, batch))
        now, parts, known = self._note(), dict[_Place, Parts](), self._memory_of_state()
        for index, (site, before, content) in enumerate(
            zip(self._sites, self._before.contents, now.contents, strict=True)
        ):
            for key, value in content.items() if site.form not in BY_NUMBERS else ():
                if before.get(key, ABSENT) is not value:
                    parts[index, key] = parts_of(value, known)
        return _Seen(contents=now.contents, parts=parts, result=result)

    def _moved(self, call: Call, batch: Batch, compute: Compute) -> _Seen | None:
        """The call with other weights; None where it cannot be made with them."""
        trained = [p for p in self._auditor.state.trained if p.requires_grad]
        with moved(trained), suppress(Exception):
            return self._call(call, batch, compute)
        return None

    def _memory_of_state(self) -> frozenset[int]:
        tensors = (
            tensor
            for module in structure.submodules(self._auditor.state.modules)
            for tensor in (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
            if tensor is not None
        )
        return frozenset(map(storage_of, tensors)) - {0}

    def _note(self) -> Note:
        return note(self._sites, copied_bytes=COPIED_BYTES)
