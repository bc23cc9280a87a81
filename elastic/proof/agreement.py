"""A state counts only once all ranks are known to have had it: until then it is kept, not used.

After a step that is compared, each rank computes the checksum of its state (its vote). The votes
ride in the next step's end-of-step all-reduce, in places of their own, so that every rank knows all
of them before its optimizer changes anything, at no extra message. Where the next step is not to be
waited for (a save) or none follows (a drain, the last step), the ranks exchange them at once.

A rank's ballot is its vote, and whether its node keeps a copy of that state. So a node that leaves
knows whether the others can go on with it. A copy from a GPU that is still under way is none yet.
Votes also stand on the control page: the agent of a node whose workers died before the sum can tell
whether they agreed, and no finished step is lost.

Rows of a sharded tensor are compared with themselves: nothing writes to them while a step computes
its gradients, so a rank whose rows change in the step that tells the votes tells another vote.

Ranks that differ are stopped, all of them, with the name of the first entry that differs. What
follows is decided by what the steps, done again, bring (divergence.py). It does not find what all
ranks share, such as a wrong sum of gradients. When to compare is rank 0's to decide (schedule.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from elastic.divergence import Divergence, is_repeated, may_come_as_late, nodes_at_fault, vote_of
from elastic.errors import RecipeNotExact, StatesDiffer
from elastic.events import DivergenceDetected, DivergenceJudged
from elastic.observe.log import EventLog
from elastic.proof.evidence import Evidence, differences
from elastic.snapshot.image import LiveChecksum
from elastic.snapshot.sharded import row_sums
from elastic.system.control_page import ControlPage
from elastic.train.groups import ProcessGroups
from elastic.train.state.snapshotting import Snapshotting

_KEPT = 1 << 63  # above the 63 bits of a vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares the ranks of one generation.

    node: this rank's. log: on rank 0 alone. ended_by: the difference that ended the generation
    before, where this node knows of it.
    """

    groups: ProcessGroups
    node: str
    generation: int
    log: EventLog | None
    ended_by: Divergence | None = None

    def check_same_state(self, found: Evidence, *, step: int, known: Divergence | None) -> None:
        """Every rank passes the evidence of the state of `step` that it begins with.

        known: the difference that has this step begun with again. Raises StatesDiffer or
        RecipeNotExact on every rank unless they are equal.
        """
        self.check_votes(self.groups.all_gather(vote_of(found.whole)), found, step=step, known=known)

    def check_votes(
        self, votes: Sequence[int], found: Evidence, *, step: int, known: Divergence | None
    ) -> None:
        """The same, where the ranks have told their votes."""
        if len(set(votes)) > 1:
            self.raise_difference(found, votes, step=step, agreed=step, began=step, known=known)

    def raise_difference(
        self,
        found: Evidence,
        votes: Sequence[int],
        *,
        step: int,
        agreed: int,
        began: int,
        known: Divergence | None,
    ) -> NoReturn:
        """Find which entry and whose state differs, record it, and raise on every rank alike.

        votes: of all ranks on the state after `step`, in rank order, which are not equal.
        found: of this rank's state. agreed: the last step on which they agreed. began: the step
        with whose state the generation began. known: the difference that has steps done again.
        """
        different = differences(*self.groups.all_gather(found))
        entry = different[0] if different else ""
        kinds = dict.fromkeys(votes)
        alike = [[rank for rank, of_rank in enumerate(votes) if of_rank == vote] for vote in kinds]
        # Before step 1 the script alone has made the objects: no machine is blamed.
        is_recipe = step == 0 or is_repeated(known, step)
        is_late = may_come_as_late(self.ended_by, began=began, agreed=agreed, step=step)
        is_unclear = any(self.groups.all_gather(is_late)) and not is_recipe
        if self.log is not None:
            self.log.record(DivergenceDetected(step=step, entry=entry, ranks=alike))
            if is_recipe:
                self.log.record(DivergenceJudged(step=step, entry=entry, nodes=[], verdict="recipe"))
        # A barrier: rank 0 has recorded it before any rank ends, whose agent then kills the others.
        nodes = tuple(self.groups.all_gather(self.node))
        what = (
            f"{entry or 'what the objects were built with'} differs between ranks {' | '.join(map(str, alike))} {f'after step {step}' if step else 'before step 1'}"
            + f" ({len(different)} entries do)" * (len(different) > 1)
        )
        if is_unclear:
            raise RecipeNotExact(
                f"{what}. They differed about {step - began} steps after the last beginning too, and agreed when those steps were done again: the recipe keeps "
                "something outside its State, or a machine is often wrong. elastic-train check RECIPE and --audit 1steps look for the first; the same command "
                "goes on from the newest checkpoint"
            )
        if is_recipe:
            why = (
                "So it did when these steps were done again: the recipe calls eval(), an update or a forward on some ranks only (`if run.is_first:`), draws from a "
                "generator of its own or the clock, reads other files, or takes the order of a set (a machine that is wrong every time looks the same)"
            )
            if step == 0:
                why = (
                    "Every rank must build the same objects: from the run's seed after elastic.start, without a rank in it, and from files that another "
                    "command has made"
                )
            raise RecipeNotExact(f"{what}. {why}")
        then = "that state is loaded once more"
        if step != agreed:
            then = f"all agreed up to step {agreed}, and what follows is done again"
        raise StatesDiffer(
            f"{what}; {then}",
            Divergence(
                generation=self.generation,
                step=step,
                agreed=agreed,
                entry=entry,
                votes=tuple(votes),
                nodes=nodes,
                began=began,
            ),
        )


@dataclass(slots=True, kw_only=True)
class Agreement:
    """One rank's part in the comparisons of a generation.

    step: the last one whose state all ranks are known to have had. known: the difference because of
    which steps are done again, until they have shown whose fault it was.
    """

    comparison: Comparison
    page: ControlPage
    snapshotting: Snapshotting | None
    evidence: Callable[[], Evidence]  # of the state as it is; all ranks ask for it
    step: int
    known: Divergence | None
    kept_step: int = 0  # the last one whose state every node is known to keep in memory
    _began: int = 0  # the step whose state the generation began with
    _live: tuple[int, LiveChecksum] | None = None  # on a GPU: a step, and sums that are under way
    _vote: tuple[int, int] | None = None  # the step and the vote that no other rank knows yet
    _sent: int | None = None  # the step whose votes are in the sum
    # Of a sharded state that was voted for: its tensors, and the sums of this rank's rows, which no
    # other one has, where the next step began to compute.
    _rows: Mapping[str, Tensor] = field(default_factory=dict)
    _sums: dict[str, int] = field(default_factory=dict)
    _changed: list[str] = field(default_factory=list)  # entries whose rows changed after the vote

    def begin(self) -> None:
        """All ranks have restored the same state, that of `step`."""
        self._began, known = self.step, self.known
        if known is not None and (known.at_fault or known.step <= self.step):
            self._settle(known, None)

    def is_wanted(self, step: int) -> bool:
        """Whether this step must be compared because it is done again."""
        return self.known is not None and step <= self.known.step

    def add(self, step: int, checksum: str | LiveChecksum, rows: Mapping[str, Tensor] | None = None) -> None:
        """Vote: the state after `step` has this checksum. Every rank adds one of the same step.

        rows: the tensors of that state, where some are sharded.
        """
        self._rows = rows if rows is not None and self.comparison.groups.world_size > 1 else {}
        if isinstance(checksum, LiveChecksum):
            self._live = step, checksum
            if self.comparison.groups.device.type == "cpu":
                self._end_live()
        else:
            self._add(step, vote_of(checksum))

    def watch_rows(self) -> None:
        """From here on no code writes to the state: a change is a fault of memory."""
        self._sums = row_sums(self._rows)

    def look_at_rows(self) -> None:
        """The end of that time."""
        if self._sums:
            now = row_sums(self._rows)
            self._changed += [name for name, was in self._sums.items() if now[name] != was]
            self._sums = {}

    def ballots(self) -> list[int]:
        """What this rank tells at the end of a step: a place of 64 bits for each rank."""
        self._end_live()
        if self.comparison.groups.world_size == 1:
            return []
        places = [0] * self.comparison.groups.world_size
        if self._vote is not None:
            (self._sent, vote), self._vote = self._vote, None
            rank = self.comparison.groups.rank
            self.look_at_rows()
            if self._changed:
                vote ^= rank + 1  # no two ranks tell the same one then
            self._rows = {}
            places[rank] = self._ballot(self._sent, vote, is_last=False)
        return places

    def read(self, ballots: Sequence[int], undo: Callable[[], None]) -> None:
        """What all ranks told, before the optimizer's update.

        undo: gives the state what the step has changed of it so far. Raises StatesDiffer or
        RecipeNotExact, on every rank, if they differ.
        """
        step, self._sent = self._sent, None
        if step is not None:
            self._judge(step, ballots, undo)

    def compare(self, *, is_last: bool = False) -> None:
        """Exchange the votes that were added last, now. Raises as `read` does.

        is_last: no step follows before the state is saved.
        """
        self._end_live()
        if self._vote is not None:
            (step, vote), self._vote = self._vote, None
            ballot = self._ballot(step, vote, is_last=is_last)
            self._judge(step, self.comparison.groups.all_gather(ballot), lambda: None)
            if is_last:
                self._rows = {}
            elif self._rows:  # told again in the next step's sum, which says whether rows have changed since
                self._vote = step, vote

    def compare_anew(self, step: int) -> None:
        """The votes that were added, and the states as they are now, before the update of the step
        after this one. Raises as `read` does.
        """
        self.compare()
        self.comparison.check_same_state(self.evidence(), step=step, known=self.known)

    def _end_live(self) -> None:
        if self._live is not None:
            (step, checksum), self._live = self._live, None
            self._add(step, vote_of(checksum.hexdigest()))

    def _add(self, step: int, vote: int) -> None:
        groups = self.comparison.groups
        if groups.world_size == 1:
            self._agree(step, vote)
            if self.snapshotting is not None and self.snapshotting.keeps(step, is_last=False):
                self.kept_step = step
            return
        self._vote = step, vote
        self.page.vote(groups.local_rank, step, vote)

    def _ballot(self, step: int, vote: int, *, is_last: bool) -> int:
        """The rank that copies the node's state speaks for its node."""
        kept = self.snapshotting is None or self.snapshotting.keeps(step, is_last=is_last)
        return vote | _KEPT if kept else vote

    def _judge(self, step: int, ballots: Sequence[int], undo: Callable[[], None]) -> None:
        votes = [ballot & ~_KEPT for ballot in ballots]
        if len(set(votes)) == 1:
            self._agree(step, votes[0])
            if all(ballot & _KEPT for ballot in ballots):
                self.kept_step = step
                if self.comparison.groups.local_rank == 0:
                    self.page.shared_step = step
            return
        undo()
        if self.snapshotting is not None:
            self.snapshotting.discard_newer(self.step)
        found = Evidence(self.evidence().entries | dict.fromkeys(self._changed, "changed after the vote"))
        self.comparison.raise_difference(
            found, votes, step=step, agreed=self.step, began=self._began, known=self.known
        )

    def _agree(self, step: int, vote: int) -> None:
        self.step = step
        if self.snapshotting is not None:
            self.snapshotting.agree(step, vote)
        if self.known is not None and step >= self.known.step:
            self._settle(self.known, vote if step == self.known.step else None)

    def _settle(self, known: Divergence, second_vote: int | None) -> None:
        """The ranks agree again: a machine was wrong, as an audit has said, or as it seems."""
        nodes, comparison = nodes_at_fault(known, second_vote), self.comparison
        self.known = None
        if comparison.log is not None:
            event = DivergenceJudged(step=known.step, entry=known.entry, nodes=list(nodes), verdict="machine")
            comparison.log.record(event)
            if not known.at_fault:
                print(
                    f"the ranks differed in step {known.step} and agree now that it was done again: a machine computed something else "
                    f"({' or '.join(nodes) or 'which one is not known'}), or the recipe read what another process changed (a file, a clock)"
                )
        if comparison.groups.local_rank == 0:
            self.page.is_settled = True
