"""A generation may do its first step again: it must come out as before.

A generation that ends as planned (nodes join or leave, or a rehearsal) keeps the state before its
last step as well, and the evidence of that step. The next one begins with the state before, does
the step again and compares. Where a computation differs, the workers are started once more: three
computations tell a recipe that keeps something outside its State from a recipe that is not
deterministic, and from a machine that was wrong once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic.errors import EXIT_AGAIN, RecipeNotExact
from elastic.events import Overlapped, Rehearsed, StepDiffered
from elastic.observe.log import EventLog, read_rare
from elastic.proof import evidence, verdict
from elastic.proof.evidence import LOSS, NOTHING, ComputedStep, Earlier, Evidence, differences, roots
from elastic.proof.variables import Collector
from elastic.proof.verdict import Verdict, judge
from elastic.snapshot.sharded import WORDS, row_sums
from elastic.system.clock import Clock, thread_cpu_s
from elastic.train.groups import ProcessGroups
from elastic.train.state import structure
from elastic.train.state.flat import tensor_checksum
from elastic.train.state.state import State


@dataclass(slots=True)
class Collected:
    """What the computations of one step gave, while it is under way.

    step: whose; 0 for none. losses: of this rank's shards. rows: checksums of its own.
    """

    step: int = 0
    losses: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    computations: int = 0

    def begin(self, step: int) -> None:
        self.step, self.computations = step, 0
        self.losses, self.gradients, self.rows = {}, {}, {}

    def add(self, losses: Mapping[int, Tensor], gradients: Iterable[tuple[str, nn.Parameter]]) -> None:
        """A computation ended: `.grad` has the sum over all shards."""
        self.computations += 1
        of = "" if self.computations == 1 else f" (computation {self.computations})"
        for shard, loss in losses.items():
            self.losses[f"the loss of shard {shard}{of}"] = float(loss).hex()
        named = {f"the gradient of {name}{of}": parameter.grad for name, parameter in gradients}
        there = {name: each for name, each in named.items() if each is not None and not each.is_sparse}
        self.rows |= (rows := row_sums(there))
        self.gradients |= {name: tensor_checksum(each) for name, each in there.items() if name not in rows}

    def end(self, groups: ProcessGroups, loss: float, state: Evidence) -> Evidence:
        """Of the step, on every rank: votes tell where another rank has others. Raises PeerLost.

        state: that after it.
        """
        of_ranks = groups.all_gather((self.losses, self.rows))
        losses = {name: value for of_rank, _ in of_ranks for name, value in of_rank.items()}
        in_order = sorted(losses, key=lambda name: (len(name), name))
        entries = {name: losses[name] for name in in_order} | {LOSS: loss.hex()} | self.gradients
        entries |= {name: str(sum(of_rank[name] for _, of_rank in of_ranks) % WORDS) for name in self.rows}
        entries |= {f"the State's {name}": value for name, value in state.entries.items()}
        self.step = 0
        return groups.from_rank0(Evidence(entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What each rank knows as a generation begins; unmended: rank 0 alone knows it."""

    earlier: Earlier
    is_on: bool
    accepts: bool
    unmended: int


@dataclass(slots=True, kw_only=True)
class StepAgain:
    """path: where a generation leaves evidence on this node; None where no step is done again."""

    path: Path | None
    groups: ProcessGroups
    clock: Clock
    generation: int
    log: EventLog | None  # on rank 0 alone
    events: Path  # the folder of what was recorded
    recipe: str  # its text and arguments, as a checksum
    accepts: bool  # what a restart computes, where it differs
    earlier: Earlier = NOTHING
    is_on: bool = False  # on all ranks
    closing: int = 0  # the step after which this generation ends as planned; 0 while none is
    is_rehearsal: bool = False  # why it ends
    is_dealt_anew: bool = False  # that step's shards go to other ranks when it is done again
    collected: Collected = field(default_factory=Collected)

    def look(self) -> Earlier:
        """Earlier computations of the step that is to be done again, on every rank."""
        found = NOTHING
        if self.path is not None and self.groups.local_rank == 0:
            found = evidence.take(self.path)
        mine = _Told(
            earlier=found, is_on=self.path is not None, accepts=self.accepts, unmended=self._unmended()
        )
        told = self.groups.all_gather(mine)
        of_ranks = [each.earlier for each in told if each.earlier.found]
        # A node that was away may have one of an older generation.
        self.earlier = max(of_ranks, key=lambda each: each.found[-1].generation, default=NOTHING)
        # Nodes may be started with other options.
        self.is_on, self.accepts = all(each.is_on for each in told), told[0].accepts
        if told[0].unmended:
            raise RecipeNotExact(verdict.is_unmended(told[0].unmended))
        return self.earlier

    def _unmended(self) -> int:
        """A step that differed, 0 for none: a launcher gives its command again, and each try would
        save a step that is wrong.
        """
        found = read_rare(self.events, StepDiffered) if self.log is not None and not self.accepts else []
        same = [each for each in found if each.event.recipe == self.recipe]
        newest = max(same, key=lambda each: each.time, default=None)
        return 0 if newest is None or newest.event.accepted else newest.event.step

    def refuse_end(self, step: int) -> None:
        """The recipe leaves the loop in this step. Raises RecipeNotExact, on every rank, where the
        step is done again, since it did not leave the loop the first time.
        """
        if self.is_on and step == self.earlier.step:
            raise RecipeNotExact(verdict.ends_now(step))

    def restored(self, step: int, *, is_doubtful: bool) -> None:
        """A generation that begins elsewhere, after a fault, compares nothing here.

        is_doubtful: ranks differed then, so that one of them computed something else.
        """
        if self.earlier.step != step + 1 or is_doubtful:
            self.earlier = NOTHING
        self.collected.begin(self.earlier.step)

    def close_after(self, step: int, *, is_rehearsal: bool, is_dealt_anew: bool) -> None:
        """is_dealt_anew: known on rank 0 alone; False elsewhere."""
        self.closing, self.is_rehearsal, self.is_dealt_anew = step, is_rehearsal, is_dealt_anew
        self.collected.begin(step)

    def end(
        self, step: int, state: Evidence, logged: Mapping[str, Any], loss: float, variables: dict[str, str]
    ) -> ComputedStep:
        """The step that was collected, on every rank."""
        shown = {f"the log's {name}": evidence.SHOWN + repr(value) for name, value in logged.items()}
        variables, *of_others = self.groups.all_gather(variables | shown)
        return ComputedStep(
            step=step,
            generation=self.generation,
            world_size=self.groups.world_size,
            wall_s=self.clock.wall(),
            evidence=self.collected.end(self.groups, loss, state),
            variables=variables,
            unsteady=[
                name for name, text in variables.items() if any(each.get(name) != text for each in of_others)
            ],
        )

    def leave(self, found: ComputedStep) -> bool:
        """For the next generation. Returns whether all nodes keep it: a disk may be full."""
        left = Earlier(is_rehearsal=self.is_rehearsal, found=[found], is_dealt_anew=self.is_dealt_anew)
        return self._write(left)

    def compare(self, found: ComputedStep) -> Rehearsed | Overlapped:
        """The step was done again: compare it with what it was.

        Raises SystemExit for a third computation, and RecipeNotExact, on every rank.
        """
        earlier, self.earlier = self.earlier, NOTHING
        all_found = [*earlier.found, found]
        first, step = earlier.found[0], found.step
        # A function may leave what it computed last in a variable.
        has_same_shards = not earlier.is_dealt_anew and first.world_size == found.world_size
        plain = [each.evidence for each in all_found]
        of_each = evidence.with_variables(all_found) if has_same_shards else plain
        judged = judge(of_each)
        if judged is Verdict.RANDOM:  # variables that differ each time, such as clocks, may be shown
            judged = judge(plain) if differences(*plain) else Verdict.ALIKE
        if judged is Verdict.UNCLEAR and not self._write(replace(earlier, found=all_found)):
            judged = Verdict.HIDDEN
        if judged is Verdict.UNCLEAR:
            if self.log is not None:
                print(verdict.once_more(step, differences(*of_each)), flush=True)
            # Only now may another rank end: its agent kills those of its node.
            self.groups.all_gather(0)
            raise SystemExit(EXIT_AGAIN)
        if judged in (Verdict.ALIKE, Verdict.ONCE):
            return self._alike(earlier, found, judged)
        names = differences(of_each[0], of_each[-1])
        excuse = no_determinism() if judged is Verdict.RANDOM else ""
        excuse = "--accept says so" if self.accepts else excuse
        if self.log is not None:
            event = StepDiffered(
                step=step, entries=names[:20], verdict=judged.value, accepted=bool(excuse), recipe=self.recipe
            )
            self.log.record(event)
        if excuse:
            if self.log is not None:
                print(verdict.accepted(step, names, excuse), flush=True)
            return self._alike(earlier, found, judged)
        self.groups.all_gather(0)  # only now may another rank end
        raise RecipeNotExact(verdict.differs(first, found, names, judged))

    def _alike(self, earlier: Earlier, found: ComputedStep, judged: Verdict) -> Rehearsed | Overlapped:
        seconds = max(0.0, found.wall_s - earlier.found[0].wall_s)
        kind = Rehearsed if earlier.is_rehearsal else Overlapped
        left = evidence.not_restored(earlier.found[0], found)
        event = kind(
            step=found.step, seconds=seconds, verdict=judged.value, not_restored=left, recipe=self.recipe
        )
        if self.log is None:
            return event
        before = read_rare(self.events, Rehearsed)  # each variable is named once
        said = {name for each in before for name in roots(each.event.not_restored)}
        self.log.record(event)
        if judged is Verdict.ONCE:
            names = differences(*evidence.with_variables(earlier.found))
            print(verdict.wrong_once(found.step, names), flush=True)
        elif judged is Verdict.ALIKE:
            new = [name for name in roots(left) if name not in said]
            print(verdict.alike(found.step, seconds, new, earlier.is_rehearsal), flush=True)
        return event

    def _write(self, earlier: Earlier) -> bool:
        is_written = True
        if self.path is not None and self.groups.local_rank == 0:
            try:
                evidence.write(self.path, earlier)
            except OSError:
                is_written = False
        return all(self.groups.all_gather(is_written))


def texts_of(variables: Mapping[str, Any], state: State, dataset: object) -> dict[str, str]:
    """What these reach, and the plain attributes of the State's modules and the dataset."""
    modules = structure.submodules(state.modules)
    held = {id(each) for each in (*state.objects.values(), *modules, dataset)}
    for module in modules:
        held |= set(map(id, (*module.parameters(recurse=False), *module.buffers(recurse=False))))
    collector = Collector(tensor_checksum, thread_cpu_s, held)
    for name, value in variables.items():
        collector.add(name, value)
    for name, thing in state.objects.items():
        if isinstance(thing, nn.Module):
            for path, module in thing.named_modules(prefix=name):
                collector.add_attributes(path, module)
    collector.add_attributes("the dataset", dataset)
    return collector.texts


def no_determinism() -> str:
    """Why results may differ, as the recipe has it; empty for no reason."""
    if torch.get_deterministic_debug_mode() == 2:  # it raises an error, and does not only warn
        return ""
    return "the recipe allows algorithms that are not deterministic (torch.use_deterministic_algorithms)"
