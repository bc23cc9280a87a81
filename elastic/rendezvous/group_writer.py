"""A node's changes get into the group by compare-and-set, alone or with those of other nodes.

It does not promise that a change is made once: one whose outcome is unknown is tried again, and
transitions are such that this does no harm.
"""

import random
from collections.abc import Callable

from elastic.rendezvous import transitions
from elastic.rendezvous.backends.backend import Backend, BackendFailed, OrdersByGeneration
from elastic.rendezvous.combiner import Combiner
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.observer import GroupObserver
from elastic.rendezvous.requests import Request, Verb, settings_digest
from elastic.system.clock import Clock

REQUEST_POLL_S = 0.02
CHANGE_TRIES = 200
# After a lost compare-and-set a node waits up to this at random, and twice as long after each
# further one: of many nodes that write at once, few then try at the same time.
BACKOFF_S = 0.002
LONGEST_BACKOFF_S = 0.5


class GroupWriter:
    def __init__(
        self, backend: Backend, me: Node, observer: GroupObserver, combiner: Combiner, *, clock: Clock
    ) -> None:
        self._backend = backend
        self._me = me
        self._observer = observer
        self._combiner = combiner
        self._clock = clock
        self._lost_tries = 0  # of compare-and-set, in a row
        self._is_unfenced = False  # a node that has read the request to join may be about to write

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next try, drawn at random; 0 unless the last one was lost."""
        if not self._lost_tries:
            return 0.0
        return min(BACKOFF_S * 2.0**self._lost_tries, LONGEST_BACKOFF_S) * random.random()  # noqa: S311

    @property
    def wait_s(self) -> float:
        """How long until this node is to write what others may write for it; may be infinite."""
        return self._combiner.wait_s

    def set(self, version: int | None, group: Group) -> bool:
        """Make `group` the successor of `version` unless another node was faster."""
        if isinstance(self._backend, OrdersByGeneration):
            self._backend.write_as_of(group.generation)
        is_set = self._backend.compare_and_set(version, group.to_json())
        if is_set:
            self._observer.keep(group)
        else:
            self._combiner.has_lost()
        self._lost_tries = 0 if is_set else self._lost_tries + 1
        return is_set

    def evict(self, version: int | None, group: Group, *, step: int = 0) -> Group | None:
        """Try to remove the dead nodes; where nodes combine their writes, at a random time, so that
        a few do. None before that, and if another node was faster.
        """
        is_combined = self._combiner.is_for(group)
        if is_combined and not self._combiner.is_due(group):
            return None
        evicted = transitions.evict(group, alive=self._observer.alive, step=step)
        if is_combined:
            self._combiner.take_back_of_dead()
        return evicted if self.set(version, evicted) else None

    def has_failed(self) -> None:
        """The backend does not answer: the wait begins again once it does."""
        self._combiner.has_lost()

    def take_back(self) -> None:
        """What this node waited for has happened, or is not wanted any more."""
        self._combiner.take_back()

    def join(self, version: int | None, group: Group) -> bool:
        """Try to wait for the next generation; False: another node may write that first."""
        # Heartbeat first, then the name: otherwise the others could see a node without a heartbeat
        # and count its silence.
        if not self._lost_tries and not self._combiner.is_joining:
            self._backend.beat(self._me.id)
        wish = self._wish(Verb.JOIN, group)
        if self._combiner.is_for(group):
            if not self._combiner.request(group, wish):
                return False
            group = self._combiner.with_all(group, wish)
        self.set(version, wish.apply(group, dead=frozenset()))
        return True

    def change(self, transition: Callable[[Group], Group]) -> Group:
        """Try `transition` until its compare-and-set wins; BackendFailed after CHANGE_TRIES."""
        for _ in range(CHANGE_TRIES):
            version, group = self._observer.poll()
            changed = transition(group)
            if changed == group or self.set(version, changed):
                return changed
            self._clock.sleep(self.backoff_s)
        raise self._out_of_tries()

    def change_by(self, verb_in: Callable[[Group], Verb], *, generation: int | None = None) -> Group:
        """As `change`, for what another node may write where nodes combine their writes.

        verb_in: the wanted verb in a group, as it is then. generation: the only one in which it is
        wanted, None for the present one.
        """
        # A node that has read the request to join may be about to write it. It cannot any more once
        # the version that it read is not the newest; and none that reads a later one finds it. This
        # is remembered where a call fails in between: the next try needs it, too.
        if self._combiner.is_joining:
            self._is_unfenced = True
            self._combiner.cancel()
        read_by_it = self._observer.poll()[0] if self._is_unfenced else None
        lost = 0
        while lost < CHANGE_TRIES:
            version, group = self._observer.poll()
            is_fenced = not self._is_unfenced or version != read_by_it
            wish = self._wish(verb_in(group), group, generation)
            changed = wish.apply(group, dead=self._observer.dead)
            is_done = changed == group
            if not is_done and self._combiner.is_for(group):
                if not self._combiner.request(group, wish):
                    self._clock.sleep(min(REQUEST_POLL_S, self._combiner.wait_s))
                    continue
                changed = self._combiner.with_all(group, wish)
            if (is_done and is_fenced) or self.set(version, changed):
                self._is_unfenced = False
                self._combiner.take_back()
                return changed
            lost += 1
            self._clock.sleep(self.backoff_s)
        raise self._out_of_tries()

    def _wish(self, verb: Verb, group: Group, generation: int | None = None) -> Request:
        about = group.generation if generation is None else generation
        digest = settings_digest(group.settings)
        return Request(verb=verb, node=self._me, generation=about, settings=digest)

    def _out_of_tries(self) -> BackendFailed:
        return BackendFailed(
            f"the group's state changed under {self._me.id} {CHANGE_TRIES} times in a row; try again"
        )
