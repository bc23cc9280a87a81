"""Opens communication for one generation, and says who and where this worker is.

A gloo group over all ranks always exists: digests and decisions go through it from host memory. Gradients use nccl where every worker of
the group has a GPU of its own, else gloo too. Addresses and interfaces are torch's business: MASTER_ADDR, GLOO_SOCKET_IFNAME and
NCCL_SOCKET_IFNAME mean what they always mean.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.config.environment import Launch
from elastic.errors import UsageError
from elastic.reduce.exchange import peers_may_die

BROADCAST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    rank: int
    size: int
    local_rank: int
    device: torch.device
    # None is torch's default group. Nothing of ours may hold that one: its threads end when the last reference goes, and not later than the interpreter.
    group: dist.ProcessGroup | None  # for tensors on `device`
    control: dist.ProcessGroup | None  # gloo, host memory
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # around what needs the other ranks

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. Raises PeerLost."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self.waiting(), peers_may_die("an exchange of messages"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self.control)
            longest = max(int(length) for length in lengths)
            padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
            texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(texts, padded, group=self.control)
        return [
            json.loads(bytes(text[: int(length)].numpy()))
            for text, length in zip(texts, lengths, strict=True)
        ]

    def from_first(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank; what other ranks pass is not looked at. Raises PeerLost."""
        return self.gather(value if self.rank == 0 else None)[0]

    def broadcast(self, data: Tensor | None, size_bytes: int, *, source: int) -> Tensor:
        """uint8 [size_bytes] in host memory: what rank `source` passes, on every rank; those that pass something keep their own. Raises PeerLost."""
        kept = torch.empty(size_bytes, dtype=torch.uint8) if data is None else data
        with peers_may_die("the sending of a state"):
            for start in range(0, size_bytes, BROADCAST_BYTES):
                piece = kept[start : start + BROADCAST_BYTES]
                # A rank that has the state already takes part and throws away what comes.
                is_own = data is not None and self.rank != source
                with self.waiting():  # each piece shows that the worker moves
                    dist.broadcast(torch.empty_like(piece) if is_own else piece, source, group=self.control)
        return kept

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(launch: Launch) -> torch.device:
    """The worker's GPU by its local rank (workers share where there are fewer GPUs), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()  # type: ignore[no-untyped-call] # from here on random streams reach its generator
    return device


def open_process_groups(launch: Launch, backend: str | None) -> ProcessGroups:
    """Join the group that the launcher's variables describe. backend: nccl or gloo for gradients, None to choose."""
    device = choose_device(launch)
    if backend not in (None, "nccl", "gloo"):
        raise UsageError(f"expected backend nccl, gloo or none given, found {backend!r}")
    if not launch.is_distributed:
        return ProcessGroups(rank=0, size=1, local_rank=0, device=device, group=None, control=None)
    with peers_may_die("the opening of the group"):
        dist.init_process_group("gloo")
        world = ProcessGroups(
            rank=launch.rank,
            size=launch.world_size,
            local_rank=launch.local_rank,
            device=device,
            group=None,
            control=None,
        )
        own_gpu = device.type == "cuda" and launch.local_world_size <= torch.cuda.device_count()
        if backend == "gloo" or (backend is None and not all(world.gather(own_gpu))):
            return world
        nccl = dist.new_group(backend="nccl")
        assert isinstance(nccl, dist.ProcessGroup)
    return ProcessGroups(
        rank=world.rank,
        size=world.size,
        local_rank=world.local_rank,
        device=device,
        group=nccl,
        control=world.control,
    )
