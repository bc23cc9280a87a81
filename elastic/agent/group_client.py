"""An outage of the rendezvous backend never stops workers, and no waiting node is forgotten.

This is what the agent tells the group and asks of it during a generation. A call makes a few calls
to the backend, each of which has its limit of a few seconds (a folder has none), and more where
other nodes write at the same moment. Only a node whose workers have nothing left to do gives up on
a backend, after --rdzv-timeout. Waiting nodes are admitted after the join window. What follows from
an answer is decided in decide.py; how a generation forms is the rendezvous's own.
"""

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TypeVar

from elastic.agent.shutdown_request import GivenUp, ShutdownRequest
from elastic.config.options import Options
from elastic.errors import Interrupted, RendezvousTimeout
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import Group, Node, RunEnd, WorkerFailure
from elastic.rendezvous.rendezvous import Generation, GroupView, Rendezvous
from elastic.rendezvous.transitions import NODE_JOINED, NODE_LEFT, REHEARSAL
from elastic.system.clock import Clock
from elastic.system.leave_deadline import Share
from elastic.system.untrusted import parse_number

ANSWER_S, JOIN_S = 0.02, 0.05
LOST_POLL_S = 0.05
MOST_REASONS = 5
CONNECT_S, STORE_S = 0.5, 10.0
T = TypeVar("T")


@dataclass
class GroupClient:
    """`is_first`: rank 0 ran on this node in the last generation that it entered. `is_fenced`: the
    group went on without this node since.
    """

    rendezvous: Rendezvous
    options: Options
    report: Callable[[str], None]
    shutdown: ShutdownRequest
    clock: Clock

    def __post_init__(self) -> None:
        self._calls = ThreadPoolExecutor(1)  # no two calls use the rendezvous at once
        self._polled: Future[GroupView] | None = None  # the poll that has no answer yet
        self._is_given_up = False
        self._members: tuple[Node, ...] = ()  # of the newest generation
        self._waiting_since_s = inf  # since when nodes wait to join
        self._reached_s = self.clock.monotonic()
        self._said: set[str] = set()  # why the backend did not answer, since it last did
        self._committed = self._told = 0  # the newest step with a checkpoint, here and in the group
        self.is_first = self.is_fenced = False

    def enter(self, generation: Generation) -> bool:
        """A generation has formed with this node.

        Returns whether a member of the one before has left as planned, and so waits for a
        checkpoint of the state it left behind.
        """
        before = {node.id for node in self._members}
        # After a failure or a loss, a missing member is dead. NODE_JOINED counts too: a node may
        # leave in the drain that was requested to admit another one.
        is_planned = generation.cause in (NODE_LEFT, NODE_JOINED, REHEARSAL)
        self._members, self._waiting_since_s = generation.members, inf
        self.is_first, self.is_fenced = generation.rank_of_node == 0, False
        return is_planned and not before <= {node.id for node in generation.members}

    def poll(self, *, step: int, is_idle: bool) -> GroupView | None:
        """The state of the group, or None when the backend does not answer within a moment.

        step: the last that this node's workers finished. is_idle: they have nothing left to do.
        Raises BackendFailed when an idle node has not reached the backend for --rdzv-timeout.
        """
        view, problem = None, "the place to meet did not answer"
        if self._polled is None and not self._is_given_up:
            self._polled = self._calls.submit(self._with_commit, partial(self.rendezvous.watch, step=step))
        if self._polled is not None and wait([self._polled], ANSWER_S).done:
            polled, self._polled = self._polled, None
            try:
                view = polled.result()
            except BackendFailed as error:
                problem = str(error)
                # It may be unreachable at first and then have lost its data.
                if problem not in self._said and len(self._said) < MOST_REASONS:
                    self._said.add(problem)
                    self.report(f"the rendezvous did not answer ({problem}); training goes on")
        now_s = self.clock.monotonic()
        if view is None:
            if is_idle and now_s - self._reached_s >= self.options.rdzv_timeout_s:
                self._is_given_up = self._is_given_up or self._polled is not None
                raise BackendFailed(problem)
            return None
        if self._said:
            self._said.clear()
            self.report("the rendezvous answers again")
        self._reached_s = now_s
        self._waiting_since_s = min(self._waiting_since_s, now_s) if view.newcomers else inf
        self.is_fenced = view.fenced
        return view

    def note_commit(self, step: int) -> None:
        """A checkpoint of this step is committed: further calls tell the group, until one succeeds.

        A restore that finds only older states then knows that it misses one. It does not promise
        that the group knows the newest: a node may die between a commit and the next call.
        """
        self._committed = max(self._committed, step)

    def _with_commit(self, call: Callable[[], T]) -> T:
        if (step := self._committed) > self._told:
            with suppress(BackendFailed):
                self.rendezvous.report_commit(step)
                self._told = step
        return call()

    def join(self, leaves: Callable[[], bool], *, meanwhile: Callable[[], object]) -> Generation:
        """The next generation with this node, whose workers must be stopped.

        leaves: whether the wait is to end. meanwhile: called several times a second. Raises what
        `Rendezvous.join` raises, Interrupted also where the rendezvous does not answer
        within the share of a drain, and RendezvousTimeout where this node does not reach those
        that serve the stores.
        """
        self._polled = None
        if self._is_given_up:
            raise Interrupted
        joined = self._calls.submit(self._join_reached, leaves)
        while not wait([joined], JOIN_S).done:
            meanwhile()
            if self.shutdown.is_over(Share.DRAIN):
                self._give_up()
                raise Interrupted
        generation = joined.result()
        self._reached_s = self.clock.monotonic()
        return generation

    def _join_reached(self, leaves: Callable[[], bool]) -> Generation:
        while True:
            generation = self.rendezvous.join(leaves)
            if not generation.rank_of_node or self._reaches_store(generation):
                return generation

    def _reaches_store(self, generation: Generation) -> bool:
        """Whether the machine that serves the generation's store answers this node; False where the
        generation is over before that is known.
        """
        host, _, port = generation.endpoint.rpartition(":")
        # If that machine is dead, the generation is over a keep-alive later.
        limit_s = max(STORE_S, 2 * self.options.keep_alive_s)
        until_s = self.clock.monotonic() + limit_s
        while True:
            try:
                socket.create_connection((host, parse_number(port) or 0), timeout=CONNECT_S).close()
                return True
            except ConnectionRefusedError:
                return True
            except (OSError, OverflowError) as error:  # the second for a number that is no port
                if self.clock.monotonic() >= until_s:
                    raise RendezvousTimeout(
                        f"the store of generation {generation.number} at {generation.endpoint} should answer within {limit_s:g} s, but did"
                        f" not ({error}); is the address that nodes publish (--local-addr, GLOO_SOCKET_IFNAME) reachable from here?"
                    ) from error
            with suppress(BackendFailed):
                view = self.rendezvous.watch()
                if self.shutdown.reason is not None or view.fenced or not view.open:
                    return False
            self.clock.sleep(LOST_POLL_S)

    def admits(self, view: GroupView) -> bool:
        """Whether the nodes that wait are to be admitted now, all of them by one drain.

        That is so once one of them has waited for the join window: without it, machines that start
        at the same time would drain the group one by one. A node that fills the group is the last
        that could come. Only the agent of rank 0 decides it: a drain that one agent requests drains
        all nodes.
        """
        if not self.is_first or not view.newcomers:
            return False
        waited_s = self.clock.monotonic() - self._waiting_since_s
        is_full = len(self._members) + len(view.newcomers) == self.options.max_nodes
        return is_full or waited_s >= self.options.join_window_s

    def report_done(self) -> bool:
        """All workers of this node finished. Returns whether the backend answered."""
        return self._answer(Share.DRAIN, partial(self._with_commit, self.rendezvous.done), None) is not None

    def close(
        self, cause: str, *, step: int, counts: bool, failure: WorkerFailure | None, longest_s: float = inf
    ) -> Group | None:
        """Close the generation unless another node did; counts: it uses up a restart.

        None when the backend does not answer. Then the rendezvous closes it when this node joins
        the next generation.
        """
        closes = partial(self.rendezvous.close, cause, step=step, counts=counts, failure=failure)
        return self._answer(Share.GROUP, closes, None, longest_s=longest_s)

    def loses_member(self, within_s: float) -> bool:
        """Whether a member of the closed generation is found dead, within this time at most."""
        end_s = partial(self.shutdown.end_s, Share.DRAIN, self.clock.monotonic(), within_s)
        while len(self._members) > 1 and (left_s := end_s() - self.clock.monotonic()) > 0:
            # The lost machine may have served the rendezvous.
            with suppress(BackendFailed, GivenUp):
                asks = self.rendezvous.has_lost_member
                if self.shutdown.within(Share.DRAIN, asks, longest_s=left_s, calls=self._calls):
                    return True
            self.clock.sleep(LOST_POLL_S)
        return False

    def end(self, run_end: RunEnd, *, of_any: bool = False) -> bool:
        """End the run for all nodes; without an answer, the others come to the same end.

        of_any: also in a newer generation than this node's. Returns whether the backend answered.
        """
        share = Share.SAVE if of_any else Share.GROUP
        return self._answer(share, partial(self.rendezvous.end, run_end, of_any=of_any), None) is not None

    def withdraw(self, is_shared: Callable[[int], bool]) -> tuple[bool, int | None]:
        """The workers of this node have stopped, and it is to leave. Returns as `Rendezvous` does.

        is_shared: whether the members of a generation have its newest state in memory. If no node
        goes on with it, as far as the backend answers, the next generation waits until this node
        has left.
        """
        alone: tuple[bool, int | None] = False, None
        return self._answer(Share.GROUP, partial(self.rendezvous.withdraw, is_shared), alone)

    def leave(self) -> None:
        """Leave the group; without an answer, the others notice the silence."""
        self._answer(Share.REPORT, partial(self._with_commit, self.rendezvous.leave), None)

    def _answer(self, share: Share, call: Callable[[], T], otherwise: T, *, longest_s: float = inf) -> T:
        """Of the backend; `otherwise` where it fails, or hangs for longer than its share."""
        if self._is_given_up:
            return otherwise
        try:
            return self.shutdown.within(share, call, longest_s=longest_s, calls=self._calls)
        except BackendFailed:
            pass
        except GivenUp:
            self._give_up()
        return otherwise

    def _give_up(self) -> None:
        self._is_given_up = True
        self.report("the rendezvous does not answer, and this node leaves without it")
