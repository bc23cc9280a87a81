"""The rendezvous of `torchrun --rdzv-backend elastic --rdzv-endpoint DIR`, torch's interface.

Each generation has a fresh TCPStore, so that no process can read what an older generation wrote.
torch's own handler keeps one store for all generations. There a worker can read the address that a
worker of the generation before it had left, and its process group hangs until a timeout. It also
keeps the first master address it saw, after the node of rank 0 has changed.

torchrun does not tell it steps, nor the number of workers of a node. So it does not count progress
or limit workers, and a change of membership stops the workers at once, as in torchrun. Our own
agent does without it (agent/group_client.py).
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # public by its documentation
from torch.distributed.elastic import rendezvous as torch_rendezvous

from elastic.config import environment
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, GroupEnded, RendezvousTimeout, UsageError
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.group import Node, RunEnd
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.rendezvous import Generation, Rendezvous
from elastic.rendezvous.store_socket import StoreSockets
from elastic.rendezvous.transitions import FAILURE, NODE_JOINED, NODE_LOST
from elastic.system.addresses import new_node_id, node_address
from elastic.system.clock import SystemClock

CONNECT_TRIES = 3
CONNECT_TIMEOUT = timedelta(seconds=10)
STORE_TIMEOUT = timedelta(seconds=300)

# torch's agents count down in the generation's store as their workers succeed; the last sets this.
_ALL_SUCCEEDED_KEY = "torchelastic/agent/terminal_state/last_member"


class ElasticRendezvous(torch_rendezvous.RendezvousHandler):
    def __init__(self, rendezvous: Rendezvous, sockets: StoreSockets, *, run_id: str) -> None:
        """`sockets.open` must be the `open_endpoint` of `rendezvous`."""
        self._rendezvous = rendezvous
        self._sockets = sockets
        self._run_id = run_id
        self._store: Store | None = None
        self.generation: Generation | None = None

    def get_backend(self) -> str:
        return "elastic"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> torch_rendezvous.RendezvousInfo:
        """Close this node's generation if it is still open, and wait for the next.

        The node's workers must be stopped. Raises RendezvousClosedError once the run has ended,
        RendezvousTimeoutError, our BackendFailed, and RendezvousConnectionError if the stores of
        three generations in a row could not be reached.
        """
        self._close_own()
        reason = ""
        for _ in range(CONNECT_TRIES):
            generation = self._join()
            try:
                return self._entered(generation, self._open_store(generation.endpoint))
            except (RuntimeError, ValueError) as error:
                # Its store cannot be reached from here, and its heartbeats can. Nodes that did
                # reach it see the close and join again. Where the place to meet does not answer
                # either, `join` closes the generation as soon as it does.
                reason = str(error).partition("\n")[0]
                with contextlib.suppress(BackendFailed):
                    self._rendezvous.close(NODE_LOST, step=0, counts=False)
        raise torch_rendezvous.RendezvousConnectionError(
            f"the TCPStore of {CONNECT_TRIES} generations in a row should answer within {CONNECT_TIMEOUT}, but did not"
            f" ({reason}); is the address that nodes publish (--local-addr, GLOO_SOCKET_IFNAME) reachable from here?"
        )

    def num_nodes_waiting(self) -> int:
        """How many reasons there are to restart: lost nodes, else newcomers that can be admitted.

        torch's agent restarts its workers when this is above 0. torch's own handler counts
        newcomers only, so its agents never notice that a node died.
        """
        view = self._rendezvous.watch()
        if view.ended is not None:
            return 0 if view.ended.exit_code == EXIT_COMPLETE else 1
        if view.lost or view.fenced or not view.open:
            return max(1, len(view.lost))
        return len(view.newcomers)

    def is_closed(self) -> bool:
        """Whether the run has ended: torch's word. A closed *generation* is followed by another."""
        return self._rendezvous.watch().ended is not None

    def set_closed(self) -> None:
        """End the run for all nodes."""
        self._rendezvous.end(RunEnd(exit_code=EXIT_FAILED, reason="closed by the launcher"))

    def shutdown(self) -> bool:
        """End the run if the workers of all nodes succeeded, else leave it: the others go on.

        torch's own handler closes the run for all nodes as soon as one agent ends without success.
        """
        if not self.is_closed():
            if self._all_succeeded():
                self._rendezvous.end(RunEnd(exit_code=EXIT_COMPLETE, reason="complete"))
            else:
                self._rendezvous.leave()
        self._rendezvous.stop()
        return True

    def _join(self) -> Generation:
        try:
            return self._rendezvous.join(lambda: False)
        except GroupEnded as error:
            raise torch_rendezvous.RendezvousClosedError(str(error)) from error
        except RendezvousTimeout as error:
            raise torch_rendezvous.RendezvousTimeoutError(str(error)) from error

    def _close_own(self) -> None:
        """Close the generation that this node's workers were in; torch's agent does not say why."""
        if self.generation is None:
            return
        # If the backend is out of reach, `join` closes the generation as soon as it is back.
        with contextlib.suppress(BackendFailed):
            view = self._rendezvous.watch()
            if view.open and not view.fenced:
                cause = NODE_JOINED if view.newcomers else FAILURE
                self._rendezvous.close(cause, step=0, counts=cause == FAILURE)

    def _open_store(self, endpoint: str) -> TCPStore:
        """Serve the store of a generation that this node formed, or connect to the node that does.

        Raises torch's DistError, a RuntimeError; or ValueError for an endpoint without a port.
        """
        own = self._sockets.take(endpoint)
        host, _, port = endpoint.rpartition(":")
        store = TCPStore(
            host,
            int(port),
            is_master=own is not None,
            wait_for_workers=False,
            timeout=CONNECT_TIMEOUT,
            master_listen_fd=None if own is None else own.detach(),
        )
        store.set_timeout(STORE_TIMEOUT)
        return store

    def _entered(self, generation: Generation, store: TCPStore) -> torch_rendezvous.RendezvousInfo:
        self.generation = generation
        self._store = PrefixStore(f"generation-{generation.number}", store)
        host, port = generation.endpoint.rsplit(":", 1)
        where = torch_rendezvous.RendezvousStoreInfo(host, int(port))
        rank, size = generation.rank_of_node, len(generation.members)
        return torch_rendezvous.RendezvousInfo(self._store, rank, size, where)

    def _all_succeeded(self) -> bool:
        try:
            return self._store is not None and self._store.check([_ALL_SUCCEEDED_KEY])
        except RuntimeError:
            # The store went with the node of rank 0. If all had succeeded, that node would have
            # ended the run before it left.
            return False


def creator() -> Callable[[torch_rendezvous.RendezvousParameters], torch_rendezvous.RendezvousHandler]:
    """The entry point of `torchrun.handlers`."""
    return _from_torchrun


def _from_torchrun(params: torch_rendezvous.RendezvousParameters) -> torch_rendezvous.RendezvousHandler:
    """`endpoint` is a folder that all nodes share; runs with different --rdzv-id do not meet in it.

    Takes last_call_timeout, join_timeout and keep_alive, in seconds, from --rdzv-conf.
    """
    if not params.endpoint:
        raise UsageError("--rdzv-backend elastic needs --rdzv-endpoint DIR, a folder that all nodes share")
    policy = GroupPolicy(
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        last_call_s=float(params.get("last_call_timeout", 2.0)),
        timeout_s=float(params.get("join_timeout", 600.0)),
    )
    address = params.local_addr or node_address(environment.variables())
    sockets = StoreSockets(address)
    rendezvous = Rendezvous(
        DirectoryBackend(Path(params.endpoint) / quote(params.run_id, safe="")),
        Node(id=new_node_id(), address=address, nproc=1),
        policy,
        keep_alive_s=float(params.get("keep_alive", 2.0)),
        clock=SystemClock(),
        open_endpoint=sockets.open,
    )
    return ElasticRendezvous(rendezvous, sockets, run_id=params.run_id)
