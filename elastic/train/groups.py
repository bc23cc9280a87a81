"""The process groups of one generation, and this worker's rank, world size and device in them.

Under a launcher a gloo group has all ranks: checksums and decisions go through it, from host
memory. In plain python there is one rank and no group. Gradients use nccl where every worker of the
generation has a GPU of its own, else gloo too. Addresses and interfaces are torch's business:
MASTER_ADDR, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME mean what they always mean.

A group does not survive the death of a peer: that raises PeerLost, and a new generation opens its
own groups.
"""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, is_dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # public by its documentation

from elastic.config.environment import Assignment, Launch
from elastic.errors import UsageError
from elastic.reduce.exchange import peers_may_die
from elastic.system.untrusted import decode, encode

PIECE_BYTES = 16 * 1024 * 1024
MESSAGE_BYTES = 4096  # of a short one
LENGTH = struct.Struct("<q")
KEY_LIMIT = timedelta(minutes=30)  # for a key that is absent: torch's own for a group that opens

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """A group that is None is torch's default group, if there is one.

    No reference to the default group is kept: its threads end with the last reference, and that
    must happen before the interpreter finalizes.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    gradients: dist.ProcessGroup | None = None  # for tensors on `device`
    control: dist.ProcessGroup | None = None  # gloo, host memory
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # around each wait for other ranks
    store: Store | None = None  # of the generation; None in plain python

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank. Raises PeerLost.

        Values are JSON, or dataclasses of one type whose fields `untrusted.decode` knows.
        """
        if self.world_size == 1:
            return [value]
        text = json.dumps(encode(value)).encode()
        mine = torch.frombuffer(bytearray(LENGTH.pack(len(text)) + text), dtype=torch.uint8)
        found, longest = list[memoryview](), MESSAGE_BYTES
        with self.waiting(), peers_may_die("an exchange of messages"):
            # Short ones, as most are, in one exchange; else once more, with room for the longest.
            while not found or max(map(_message_bytes, found)) > longest:
                longest = max([longest, *map(_message_bytes, found)])
                padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
                rows = [torch.empty_like(padded) for _ in range(self.world_size)]
                dist.all_gather(rows, padded, group=self.control)
                found = [row.numpy().data for row in rows]
        kind, read = type(value), json.loads
        if is_dataclass(kind):
            read = partial(decode, kind, what=f"a rank's {kind.__name__}")
        return [read(bytes(each[LENGTH.size : _message_bytes(each)])) for each in found]

    def from_rank0(self, value: T) -> T:
        """Rank 0's value on every rank; those of other ranks are ignored. Raises PeerLost."""
        return self.all_gather(value)[0]

    def pass_along(
        self, chain: Sequence[int], size_bytes: int, data: Tensor | Callable[[int, memoryview], None]
    ) -> None:
        """Bring bytes in host memory from the first rank of `chain` to the others.

        Every rank of the chain calls it: the first with the uint8 [size_bytes], each other with
        what keeps a piece at an offset. It passes a piece on while it receives the next. Raises
        PeerLost, and what `data` raises.
        """
        place, sending = chain.index(self.rank), None
        with peers_may_die("the sending of a state"):
            for start in range(0, size_bytes, PIECE_BYTES):
                with self.waiting():  # once per piece, so that the agent sees progress
                    if isinstance(data, Tensor):
                        piece = data[start : start + PIECE_BYTES]
                    else:
                        piece = torch.empty(min(PIECE_BYTES, size_bytes - start), dtype=torch.uint8)
                        dist.recv(piece, chain[place - 1], group=self.control)
                        data(start, piece.numpy().data)
                    if sending is not None:
                        sending.wait()
                    if place < len(chain) - 1:
                        sending = dist.isend(piece, chain[place + 1], group=self.control)
            if sending is not None:
                with self.waiting():
                    sending.wait()

    def exchange(
        self, outgoing: Callable[[int], list[Tensor]], incoming: Callable[[int], list[Tensor]]
    ) -> None:
        """Send bytes to every rank, and receive some of each; all ranks call it.

        outgoing: uint8 [n], in host memory, for a rank (this one too). incoming: what takes those
        of a rank, of as many bytes in all. Raises PeerLost.
        """
        for shift in range(self.world_size):
            to, source = (self.rank + shift) % self.world_size, (self.rank - shift) % self.world_size
            given, taken = _pieces(outgoing(to)), _pieces(incoming(source))
            for sent, received in zip_longest(given, taken, fillvalue=list[Tensor]()):
                data = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8)
                if shift:
                    with self.waiting(), peers_may_die("the exchange of a state"):
                        sending = dist.isend(data, to, group=self.control) if sent else None
                        data = torch.empty(sum(map(len, received)), dtype=torch.uint8)
                        if received:
                            dist.recv(data, source, group=self.control)
                        if sending is not None:
                            sending.wait()
                for each, part in zip(received, torch.split(data, [*map(len, received)]), strict=True):
                    each.copy_(part)

    def tell(self, key: str, value: str, *, is_at_once: bool = True) -> None:
        """Write a value down under `key/RANK` for all ranks of this generation.

        Each finds it once this returns, or soon after. Raises PeerLost.
        """
        if self.store is not None:
            with peers_may_die("a note in the store"):
                self.store.set(f"{key}/{self.rank}", value)
                if is_at_once:
                    self.store.get(f"{key}/{self.rank}")

    def told_by_all(self, key: str) -> list[str]:
        """What each rank wrote down there last, by rank; none until all have. Raises PeerLost."""
        names = [f"{key}/{rank}" for rank in range(self.world_size)]
        with peers_may_die("a look at what others told"):
            if self.store is None or not self.store.check(names):
                return []
            return [each.decode() for each in self.store.multi_get(names)]

    def have_told(self, key: str, within_s: float) -> bool:
        """Whether each rank has written down a value under `key/RANK` by then."""
        with self.waiting(), suppress(RuntimeError):
            if self.store is not None:
                names = [f"{key}/{rank}" for rank in range(self.world_size)]
                self.store.wait(names, timedelta(seconds=within_s))
            return True
        return False

    def told(self, key: str) -> str | None:
        """What a rank wrote down, or None. It does not wait, and an error is no answer."""
        with suppress(RuntimeError):
            if self.store is not None and self.store.check([key]):
                return self.store.get(key).decode()
        return None

    def with_nccl(self) -> "ProcessGroups":
        """For gradients. Raises PeerLost."""
        with peers_may_die("the opening of the group"):
            return replace(self, gradients=_nccl())

    def reopened(self, name: str) -> "ProcessGroups":
        """The same ranks in fresh groups, once all of them have asked for it by this name.

        The old groups are closed at once, which ends the waits of other ranks in them. Raises
        PeerLost.
        """
        if self.store is None:
            return self
        self.close()
        gradients = None
        with self.waiting(), peers_may_die("the opening of fresh groups"):
            store = PrefixStore(name, self.store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
            if self.gradients is not None:
                gradients = _nccl()
        return replace(self, gradients=gradients)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _pieces(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Their bytes in pieces, all but the last of PIECE_BYTES."""
    piece, room = list[Tensor](), PIECE_BYTES
    for each in tensors:
        while len(each):
            piece.append(each[:room])
            each, room = each[room:], room - len(piece[-1])  # noqa: PLW2901 - what is left of it
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def _message_bytes(message: memoryview) -> int:
    return LENGTH.size + int(LENGTH.unpack_from(message)[0])


def device_of(launch: Launch, backend: str | None) -> torch.device:
    """The worker's GPU by its local rank (workers share where there are fewer GPUs), or the CPU.

    Raises UsageError for a backend that is not gloo, or nccl with GPUs.
    """
    has_gpu = torch.cuda.is_available()
    if backend not in (None, "gloo") and not (backend == "nccl" and has_gpu):
        raise UsageError(f"expected backend gloo, none, or nccl where there are GPUs, found {backend!r}")
    if not has_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()  # type: ignore[no-untyped-call] # from here on random streams reach its generator
    return device


def has_own_gpu(launch: Launch, device: torch.device) -> bool:
    return device.type == "cuda" and launch.local_world_size <= torch.cuda.device_count()


def open_process_groups(launch: Launch, assignment: Assignment, device: torch.device) -> ProcessGroups:
    """Join the gloo group of this assignment. Raises PeerLost."""
    if assignment.master is None:
        return ProcessGroups(rank=0, world_size=1, local_rank=0, device=device)
    with peers_may_die("the opening of the group"):
        if assignment.agent is None or not assignment.agent.imports_library:
            dist.init_process_group("gloo")  # torch opens the store in rank 0
        else:
            store = open_store(*assignment.master, assignment.store_fd)
            dist.init_process_group(
                "gloo", store=store, rank=assignment.rank, world_size=assignment.world_size
            )
        return ProcessGroups(
            rank=assignment.rank,
            world_size=assignment.world_size,
            local_rank=launch.local_rank,
            device=device,
            store=dist.distributed_c10d._get_default_store(),  # noqa: SLF001
        )


def open_store(host: str, port: int, listening_fd: int | None) -> Store:
    """Serve the generation's store on that socket, or connect to the worker that does.

    The agent has bound the socket before the address was published (rendezvous/store_socket.py). A
    worker that connects earlier waits in its queue, without limit: an agent whose node dies or is
    cut off is evicted, and the others then kill their workers.
    """
    if listening_fd is None:
        return TCPStore(host, port, is_master=False, timeout=KEY_LIMIT)
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=KEY_LIMIT, master_listen_fd=listening_fd
    )


def _nccl() -> dist.ProcessGroup:
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)  # it is none for ranks outside of it alone
    return group
