"""The shards of each rank follow its speed from step to step, the same on every rank.

Balance (reduce/balance.py) decides from the seconds that ride in the end-of-step sum. Here its
decisions reach the exchange, when a step begins, and the loader, as far ahead as it reads. It is
no part of the training's state: a new generation begins with equal spans.

It does nothing in a world of one, with `--balance off` on any node, on GPUs, where a rank's own
seconds lack the kernels that its host waits for in a sum (Pace), and in `elastic-train check`,
which compares runs of other spans on purpose.
"""

from dataclasses import dataclass

from elastic.events import ShardsMoved
from elastic.observe.log import EventLog
from elastic.reduce.balance import Balance
from elastic.reduce.exchange import Exchange
from elastic.reduce.tree import spans_of
from elastic.train.groups import ProcessGroups
from elastic.train.step.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing:
    """log: on rank 0 alone."""

    exchange: Exchange
    balance: Balance
    log: EventLog | None

    def own_shards(self, step: int) -> range:
        """Of this rank, in a step as far ahead as Balance knows."""
        counts, rank = self.balance.counts(step), self.exchange.rank
        start = sum(counts[:rank])
        return range(start, start + counts[rank])

    def end(self, step: Step) -> None:
        """The step is over, and nothing of the next one has begun.

        An audited step says nothing of speeds: its audit takes time, too.
        """
        own_s = None if step.outcome is None or step.audit is not None else step.outcome.own_s
        shards = self.balance.add(step.number, own_s)
        if shards is not None and self.log is not None:
            before = [len(each) for each in self.exchange.spans]
            self.log.record(ShardsMoved(step=self.balance.effective, shards=list(shards), before=before))
        if step.number + 1 == self.balance.effective:
            self.exchange.divide(spans_of(self.balance.counts(self.balance.effective)))


def balancing_of(
    groups: ProcessGroups, exchange: Exchange, *, is_wanted: bool, reads_ahead: int, log: EventLog | None
) -> Balancing | None:
    """None where spans stay equal. Every rank calls it.

    is_wanted, reads_ahead: of this rank; nodes may be started with other options. Raises PeerLost.
    """
    if groups.world_size == 1:
        return None
    of_ranks: list[list[int]] = groups.all_gather([int(is_wanted), reads_ahead])
    if not all(wanted for wanted, _ in of_ranks):
        return None
    balance = Balance(tuple(map(len, exchange.spans)), max(ahead for _, ahead in of_ranks))
    return Balancing(exchange=exchange, balance=balance, log=log)
