"""`run.fully_shard` is torch's FSDP2 with this run's ranks and sums.

It shards at every world size, also at one, so that a state is cut and a policy acts alike. A
sharded module's collectives go through a process group of their own: those of the run may be under
way in another thread.

It does not see what a recipe computes of the rows that its rank has (`to_local`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined] # public by its documentation

from elastic.data.loader import Batch
from elastic.errors import UsageError
from elastic.reduce.exchange import Exchange, all_gather, peers_may_die
from elastic.snapshot.sharded import WORDS, is_sharded
from elastic.system.clock import SystemClock
from elastic.system.silence import Phase
from elastic.train.groups import ProcessGroups
from elastic.train.sharded import clip, dtensor
from elastic.train.sharded.sums import Allocating, Computation, ModuleSums, Round, rounds
from elastic.worker.heartbeat import HeartbeatSender

TOLD, MOST_AHEAD, POLL_S = "does", 16, 0.001
OPTIONS = {"reshard_after_forward", "mp_policy", "ignored_params"}


class ShardedModules:
    """The sharded modules of one rank, and the rounds in which their gradients are added up."""

    def __init__(
        self,
        groups: ProcessGroups,
        heartbeat: HeartbeatSender,
        shards: int,
        refuse_inside: Callable[[str], None],
    ) -> None:
        """refuse_inside: raises UsageError for a call that rank 0 alone makes."""
        from torch.distributed.device_mesh import DeviceMesh

        self._groups, self._heartbeat, self._refuse_inside = groups, heartbeat, refuse_inside
        self._modules: list[tuple[Any, ModuleSums]] = []
        self.computation = Computation(shards=shards, world_size=groups.world_size, waiting=groups.waiting)
        self._left: list[Round] = []  # of the computation under way
        self.ids: dict[int, nn.Parameter] = {}  # all sharded parameters, by their id
        self._watched: set[int] = set()
        self._given: list[nn.Parameter] = []  # that got a gradient in this round, each time
        self._number, self._newest = 0, deque[str](maxlen=MOST_AHEAD)  # of what was told, and the last of it
        self._depth = 0  # of sharded modules whose forwards are under way
        self._is_met = False  # whether all ranks are where all of them gather alike
        if not dist.is_initialized():  # in plain python
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        with peers_may_die("the opening of the group"):
            group = dist.new_group(backend="gloo" if groups.gradients is None else "nccl")
        assert isinstance(group, dist.ProcessGroup)  # it is none for ranks outside of it alone
        self._mesh = DeviceMesh.from_group(group, groups.device.type)
        dtensor.make_alike(self.meet)
        clip.gathering = self._gathering_norms

    def add(self, module: Any, options: dict[str, Any]) -> Any:
        """Shard it. Raises UsageError, and what torch raises."""
        from torch.distributed.fsdp import fully_shard

        if unknown := sorted(options.keys() - OPTIONS):
            raise UsageError(
                f"run.fully_shard({unknown[0]}=...): expected no options but {', '.join(sorted(OPTIONS))}; the run itself has the mesh, and cuts rows"
            )
        if not isinstance(options.get("reshard_after_forward"), bool | None):
            raise UsageError(
                "run.fully_shard(reshard_after_forward=...): expected True, False or None, found a number of ranks"
            )
        parts = module if isinstance(module, Sequence) else [module]
        number, first = len(self._modules), parts[0]
        name = f"sharded module {number} ({type(first).__name__})"
        try:
            found = fully_shard(module, mesh=self._mesh, **options)
        except (ValueError, NotImplementedError) as error:  # torch refuses it on every rank
            raise UsageError(f"run.fully_shard: {error}") from error
        every = (p for part in parts for p in part.parameters())
        own = {id(p): p for p in every if is_sharded(p) and id(p) not in self.ids}
        self.ids |= own
        sums = ModuleSums(number, name, [*own.values()], self.computation)
        first.set_gradient_divide_factor(1.0)  # a loss is divided by the shards already
        first.set_force_sum_reduction_for_comms(True)
        if own:
            first.set_custom_all_gather(_Gather(number, self.computation, self.meet))
            first.set_custom_reduce_scatter(sums)
            if self.computation.world_size == 1:
                first.set_all_reduce_hook(sums.all_reduce_hook)
        for part in parts:
            dtensor.refuse_settings(part)
            part.register_forward_pre_hook(self._enter, prepend=True)
            part.register_forward_hook(self._leave, always_call=True)
        self._modules.append((first, sums))
        return found

    def reshard(self) -> None:
        """The modules hold their own rows again, as parameters and optimizers know them.

        After a forward without a backward FSDP leaves some of them whole.
        """
        for module, _ in self._modules:
            module.reshard()

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        """After a forward of the recipe's own, whose next lines may write to parameters."""
        self._depth -= 1
        if not self._depth and self._heartbeat.phase not in (Phase.STEP, Phase.SAVE):
            self.reshard()

    # What the ranks do together, one thing after another, as each of them tells.

    def goes_on(self) -> None:
        """Tell that what all do next gathers nothing for the recipe. Raises PeerLost."""
        self._tell("other work")

    def meet(self, what: str = "a forward") -> None:
        """Before gathers of the recipe's own code, which a rank that has gone on would take for
        those of a step. Raises UsageError, PeerLost.
        """
        self._refuse_inside(what)
        if (
            self._is_met
            or self._heartbeat.phase in (Phase.STEP, Phase.SAVE)
            or self.computation.world_size == 1
        ):
            return
        self._tell(what)
        with self.computation.waiting():
            while set(there := [self._thing(told) for told in self._groups.told_by_all(TOLD)]) != {what}:
                if past := [rank for rank, thing in enumerate(there) if thing not in (what, "")]:
                    raise UsageError(
                        f"expected {what} of sharded modules on all workers, which hold the parameters together, found rank {past[0]} at "
                        f"{there[past[0]]}; make each such call on all of them, not below `if run.is_first:`"
                    )
                SystemClock.sleep(POLL_S)

    def _thing(self, told: str) -> str:
        """What a rank does where this one does its newest thing; "" where it is not there yet."""
        number, *things = told.split("|")
        ahead = int(number or 0) - self._number
        return "" if ahead < 0 else things[max(-1 - ahead, -len(things))]

    def _tell(self, what: str) -> None:
        """With the things before it: a rank on a GPU may be ahead of what others have read."""
        self._number += 1
        self._newest.append(what)
        self._groups.tell(TOLD, "|".join([str(self._number), *self._newest]), is_at_once=False)

    @contextmanager
    def _gathering_norms(self) -> Iterator[None]:
        self.goes_on()
        with self.computation.waiting():
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """All ranks make equally many forwards."""
        self.meet("an evaluation")
        self._is_met = True
        try:
            yield
        finally:
            self._is_met = False
        self.reshard()

    # One computation of a step.

    def with_filler(self, load: Callable[[], list[Batch]], shard: Callable[[int], Batch]) -> list[Batch]:
        """The batches of a step's own shards, and first those that fill rounds in which this rank
        has no shard: as a shard beyond the last. shard: loads one, by its number.
        """
        batches = load()
        missing = -(-self.computation.shards // self.computation.world_size) - len(batches)
        return [
            *(replace(shard(batches[0].shard), shard=self.computation.shards) for _ in range(missing)),
            *batches,
        ]

    def begin_computation(
        self, exchange: Exchange, audited: Sequence[int], parameters: list[nn.Parameter]
    ) -> None:
        """parameters: the sharded ones that require a gradient. audited: shards, by rank."""
        for parameter in parameters:
            if id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._given.append)  # type: ignore[no-untyped-call]
        self.goes_on()
        self._left = rounds(exchange.spans, is_reversed=exchange.is_reversed)
        self.computation.audited, self.computation.checksums = frozenset(audited), {}
        self._given.clear()

    def begin_round(self) -> None:
        self.computation.now, *self._left = self._left
        self.computation.is_last = not self._left
        self._given.clear()

    def end_round(self, parameters: list[nn.Parameter]) -> None:
        """parameters: as in `begin_computation`; the last round leaves their gradients."""
        self.computation.now = ()
        # FSDP calls the hook once for each sum, and autograd for each term past the module.
        if len(set(map(id, self._given))) < len(self._given):
            self._refuse_direct()
        if not self.computation.is_last:
            for parameter in parameters:
                parameter.grad = None
            return
        for _, sums in self._modules:
            sums.check()

    def check_output(self, output: Any) -> None:
        """Of the recipe's function. Raises UsageError."""
        if is_sharded(output):
            self._refuse_direct()

    def check_direct(self) -> None:
        """After a backward that passed no sharded module."""
        if self._given:
            self._refuse_direct()

    def _refuse_direct(self) -> NoReturn:
        raise UsageError(
            "expected sharded parameters in a forward of their module alone, found a term of the loss that uses them by itself (a penalty); "
            "take weight_decay, or compute the term in that forward"
        )

    def order(self) -> list[float]:
        """Which modules this rank has gathered and summed so far, as two small numbers."""
        return [float(self.computation.order >> shift & 0xFFF) for shift in (0, 12)]

    def check_order(self, told: list[float]) -> None:
        """told: the sum of all ranks' `order`. Raises UsageError where it was not the same."""
        if told != [self.computation.world_size * number for number in self.order()]:
            raise UsageError(
                "expected every worker to use the sharded modules in one order, found another one: workers had other modules, or forwards on some of "
                "them alone; let no data, and no rank, decide which modules run"
            )

    def audited(self) -> dict[int, dict[str, int]]:
        """The checksums of all rows of the gradients of the audited shards, by module."""
        found, self.computation.checksums = self._whole(self.computation.checksums), {}
        return found

    def again(self, shards: Sequence[int], backward: Callable[[], None]) -> dict[int, dict[str, int]]:
        """The same, of a backward in which each rank computes one of these shards again."""
        of = self.computation
        was = of.now, of.is_last, of.checksums
        of.now, of.is_last, of.is_added, of.checksums = tuple(shards), False, False, {}
        backward()
        found = self._whole(of.checksums)
        (of.now, of.is_last, of.checksums), of.is_added = was, True
        return found

    def totals(self, words: list[int]) -> list[int]:
        """The sums of each number over all ranks, which wrap at 64 bits. Raises PeerLost."""
        return [sum(each) % WORDS for each in zip(*self._groups.all_gather(words), strict=True)]

    def _whole(self, checksums: dict[int, dict[str, int]]) -> dict[int, dict[str, int]]:
        mine = [(shard, name, words) for shard, of_one in checksums.items() for name, words in of_one.items()]
        found: dict[int, dict[str, int]] = {}
        for shard, name, words in chain.from_iterable(self._groups.all_gather(mine)):
            of_one = found.setdefault(shard, {})
            of_one[name] = (of_one.get(name, 0) + words) % WORDS
        return found


class _Gather(Allocating):
    def __init__(self, module: int, of: Computation, meet: Callable[[], None]) -> None:
        self._module, self._of, self._meet = module, of, meet

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self._meet()
        self._of.note(self._module)
        with self._of.waiting(), peers_may_die("a gather of parameters"):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
