"""A state counts only once all ranks are known to have had it: until then it is kept, not used.

After a step that is compared, each rank computes the checksum of its state (its vote). The votes
ride in the next step's end-of-step all-reduce, in places of their own, so that every rank knows all
of them before its optimizer changes anything, at no extra message. Where the next step is not to be
waited for (a save) or none follows (a drain, the last step), the ranks exchange them at once.

A rank's ballot is its vote, and whether its node keeps a copy of that state. So a node that leaves
knows whether the others can go on with it. A copy from a GPU that is still under way is none yet.

Votes also stand on the control page. So the agent of a node whose workers died before the sum can
tell whether they agreed, and no finished step is lost.

It does not decide when to compare: rank 0 does (schedule.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.divergence import Divergence, nodes_at_fault, vote_of
from elastic.events import DivergenceJudged
from elastic.proof.consistency import Comparison, Voted
from elastic.snapshot.image import LiveChecksum
from elastic.system.control_page import ControlPage, Settled
from elastic.train.state.flat import FlatState, checksum_of
from elastic.train.state.snapshotting import Snapshotting

LOW_BITS = 32
_LOW = (1 << LOW_BITS) - 1
_KEPT = 1 << 63  # above the 63 bits of a vote


@dataclass(slots=True, kw_only=True)
class Agreement:
    """One rank's part in the comparisons of a generation.

    step: the last one whose state all ranks are known to have had. known: the difference because of
    which steps are done again, until they have shown whose fault it was.
    """

    comparison: Comparison
    page: ControlPage
    snapshotting: Snapshotting | None
    flatten: Callable[[], FlatState]
    step: int
    known: Divergence | None
    kept_step: int = 0  # the last one whose state every node is known to keep in memory
    _began: int = field(init=False)  # the step whose state the generation began with
    _live: tuple[int, LiveChecksum] | None = None  # on a GPU: a step, and sums that are under way
    _vote: tuple[int, int] | None = None  # the step and the vote that no other rank knows yet
    _sent: int | None = None  # the step whose votes are in the sum

    def __post_init__(self) -> None:
        self._began = self.step

    def begin(self) -> None:
        """All ranks have restored the same state, that of `step`."""
        known = self.known
        if known is not None and (known.at_fault or known.step <= self.step):
            self._settle(known, None)

    def is_wanted(self, step: int) -> bool:
        """Whether this step must be compared because it is done again."""
        return self.known is not None and step <= self.known.step

    def add(self, step: int, checksum: str | LiveChecksum) -> None:
        """Vote: the state after `step` has this checksum. Every rank adds one of the same step."""
        if isinstance(checksum, LiveChecksum):
            self._live = step, checksum
            if self.comparison.groups.device.type == "cpu":
                self._end_live()
        else:
            self._add(step, vote_of(checksum))

    def numbers(self) -> list[float]:
        """What this rank adds to the end-of-step all-reduce: two places for each rank."""
        groups = self.comparison.groups
        self._end_live()
        if groups.world_size == 1:
            return []
        places = [0.0] * (2 * groups.world_size)
        self._sent = None
        if self._vote is not None:
            self._sent, vote = self._vote
            self._vote = None
            ballot = self._ballot(self._sent, vote, is_last=False)
            places[2 * groups.rank : 2 * groups.rank + 2] = ballot >> LOW_BITS, ballot & _LOW
        return places

    def read(self, sums: list[float], undo: Callable[[], None]) -> None:
        """What the all-reduce made of all ranks' `numbers`, before the optimizer's update.

        undo: gives the state what the step has changed of it so far. Raises StatesDiffer or
        RecipeNotExact, on every rank, if they differ.
        """
        step, self._sent = self._sent, None
        if step is not None:
            ballots = [
                (int(high) << LOW_BITS) | int(low) for high, low in zip(sums[::2], sums[1::2], strict=True)
            ]
            self._judge(step, ballots, undo)

    def compare(self, *, is_last: bool = False) -> None:
        """Exchange the votes that were added last, now. Raises as `read` does.

        is_last: no step follows.
        """
        self._end_live()
        if self._vote is not None:
            (step, vote), self._vote = self._vote, None
            ballot = self._ballot(step, vote, is_last=is_last)
            self._judge(step, self.comparison.groups.all_gather(ballot), lambda: None)

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

    def _judge(self, step: int, ballots: list[int], undo: Callable[[], None]) -> None:
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
        voted = Voted(
            when=f"after step {step}",
            step=step,
            agreed=self.step,
            began=self._began,
            known=self.known,
        )
        self.comparison.raise_difference(checksum_of(self.flatten()), votes, voted)

    def _agree(self, step: int, vote: int) -> None:
        self.step = step
        if self.snapshotting is not None:
            self.snapshotting.agree(step, vote)
        if self.known is not None and step >= self.known.step:
            self._settle(self.known, vote if step == self.known.step else None)

    def _settle(self, known: Divergence, redo: int | None) -> None:
        """The steps were done again and the ranks agree: a machine was wrong, it seems.

        What a recipe read of the world may have changed in between as well.
        """
        nodes, comparison = nodes_at_fault(known, redo), self.comparison
        self.known = None
        if comparison.log is not None:
            comparison.log.record(
                DivergenceJudged(step=known.step, entry=known.entry, nodes=list(nodes), verdict="machine")
            )
            print(
                f"the ranks differed in step {known.step} and agree now that it was done again: a machine computed something else "
                f"({' or '.join(nodes) or 'which one is not known'}), or the recipe read there what another process changed (a file, a clock). Where it was a machine, the result"
                " is as if nothing had happened; else it depends on when that was read"
            )
        if comparison.groups.local_rank == 0:
            self.page.settled = Settled.HERE if comparison.node in nodes else Settled.ELSEWHERE
