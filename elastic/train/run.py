"""A recipe holds one run, the same under `elastic-train`, torchrun and plain python.

It gives the recipe its device, its data in order, its steps, and places for what it prints and
writes. It does not decide when to stop or what to save: the loop does.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from elastic.config import environment
from elastic.config.identity import new_run_from
from elastic.data import random_streams
from elastic.data.loader import Batch, BatchLoader, Data, Loader, check_dataset
from elastic.data.random_keys import key
from elastic.data.sampling import OrderOfEpoch, Sampling, whole_number
from elastic.errors import ElasticError, UsageError
from elastic.events import RunFinished
from elastic.observe.logged_event import RecipeEvent, check_event
from elastic.system import forked_child
from elastic.train import refuse
from elastic.train.evaluation import Evaluation
from elastic.train.loop.build import Begun, LoopParts, WorkerParts, is_alone
from elastic.train.loop.ends import LoopEnd
from elastic.train.loop.loop import Loop
from elastic.train.loop.on_step import Function
from elastic.train.misuse import public
from elastic.train.sharded.modules import ShardedModules
from elastic.train.state.state import State
from elastic.train.step.step import Step
from elastic.worker import script_end

LONGEST_REASON = 500  # it becomes a part of lines


class Run:
    """Made by `elastic.start`.

    `device` is this worker's; `rank`, `world_size` and `is_first` (whether this is rank 0) are
    those of the current generation. In a standby these three, and whatever needs the other workers,
    wait until it has its assignment. A recipe adds no attributes: no state would save them.
    """

    __slots__ = (
        *("_begun", "_error", "_is_open", "_kept", "_loop_end", "_open_worker", "_opened"),
        *("_sharded", "_state"),
        "device",
    )

    def __init__(self, begun: Begun, open_worker: Callable[[], WorkerParts]) -> None:
        self.device = begun.device
        self._begun = begun
        self._open_worker = open_worker
        self._opened: WorkerParts | None = None
        self._kept: list[str] = []  # lines that a standby prints if it becomes rank 0
        self._loop_end: LoopEnd | None = None
        self._state: State | None = None  # that of the loop, once it has begun
        self._sharded: ShardedModules | None = None
        self._error: ElasticError | None = None  # of a call of all ranks before the loop
        self._is_open = threading.Event()
        # A scheduler may ask a worker directly to stop, when it signals every process of a job.
        forked_child.handle_signal(signal.SIGTERM, self._request_drain)
        if not environment.is_standby():
            self._open()

    @property
    def rank(self) -> int:
        return self._worker.groups.rank

    @property
    def world_size(self) -> int:
        return self._worker.groups.world_size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @public("run.data")
    def data(  # noqa: PLR0913 - all that a recipe says about its samples
        self,
        dataset: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        tail: str = "drop",
        weights: Any = None,
        order: OrderOfEpoch | None = None,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Data:
        """A map-style dataset (with __len__ and __getitem__) in the run's order.

        epochs: passes over the data. steps: the run's last step, in place of `epochs`; the last
        epoch may be cut. tail: what becomes of the samples that do not fill a global batch, `drop`
        (left out of this epoch) or `pad` (filled up from the epoch's first samples). weights: one
        number per sample, not negative; an epoch is then len(dataset) draws with replacement, each
        with these odds. order: function(epoch) → the numbers of this epoch's samples in their
        order, any sequence of integers; it may draw random numbers, and must return the same at
        every call. workers: data-loading processes of each rank, 0 to load in this one. collate:
        list of samples → batch, torch's default_collate where it is None.

        The function `order` is called at once for each epoch of the run, and again in each epoch.
        Raises UsageError for another kind of dataset, and for arguments that do not fit: a run
        without a step, for instance (with `drop`: fewer samples than a global batch).
        """
        ours, samples = self._begun.identity, check_dataset(dataset, "run.data")
        chosen = Sampling(epochs=epochs, steps=steps, tail=tail, weights=weights, order=order)
        in_order = chosen.order_of(
            samples=samples, seed=ours.seed, global_batch=ours.global_batch, shards=ours.shards
        )
        loader = Loader(dataset=dataset, order=in_order, device=self.device, workers=workers, collate=collate)
        return Data(loader=loader)

    @public("run.fully_shard", is_of_all_ranks=True)
    def fully_shard(self, module: Any, **options: Any) -> Any:
        """Torch's `fully_shard` of a module, or of a list of modules, over the workers of this run.

        Call it as there: blocks first, then the model, before the optimizer is made. Each worker
        holds a part of the rows of each parameter, of its gradient, and of its optimizer state.
        options: `reshard_after_forward` (True or False), `mp_policy`, `ignored_params`, as torch
        has them. Returns the module. Raises UsageError for other options, and after run.steps.
        Source: Zhao et al. 2023, PyTorch FSDP; torch.distributed.fsdp.fully_shard.
        """
        if self._loop_end is not None:
            raise UsageError(
                "expected run.fully_shard before run.steps, found it after that; shard the model where it is built"
            )
        if self._sharded is None:
            self._sharded = ShardedModules(
                self._worker.groups,
                self._worker.heartbeat,
                self._begun.identity.shards,
                self._begun.step_functions.refuse_inside,
            )
        return self._sharded.add(module, options)

    @public("run.steps")
    def steps(self, data: Data, state: State) -> Iterator[Step]:
        """The steps of the run that are not done yet.

        It resumes by itself. It ends after the last step or, by SystemExit, at a drain. Raises
        UsageError for what it refuses, and NothingLoads, StatesDiffer, RecipeNotExact,
        ReplayDiffers, PeerLost or StoreFailed; none of them is for a recipe to catch.
        """
        if not isinstance(data, Data) or not isinstance(state, State):
            raise UsageError(
                "expected run.steps(data, state), with data=run.data(dataset, ...) and state=elastic.State(model=..., optimizer=...), found "
                f"{type(data).__name__} and {type(state).__name__}; give run.data a dataset, and elastic.State the objects by their names"
            )
        refuse.threads(self._begun.identity.threads)
        if self._loop_end is not None:
            raise UsageError(
                "expected one call of run.steps, found a second one: one loop goes over all epochs, and what an epoch ends with stands below `if "
                f"step.ends_epoch:`. A second phase is a recipe of its own: {new_run_from(self._begun.run_dir.url, 'SECOND_RECIPE')}"
            )
        if self._error is not None:
            raise self._error
        self._state, state.sharded = state, self._sharded
        if state.sharded is not None:
            state.sharded.goes_on()
        loop = Loop(LoopParts(self._worker, data.loader, state))
        self._loop_end = LoopEnd(loop, partial(self._ended, loop))
        script_end.add(self._loop_end)
        return self._loop_end.steps()

    @public("run.stop")
    def stop(self, reason: str) -> None:
        """End the run after this step, on purpose. Every rank calls it in the same step.

        Call it in the body of the loop, before or after the optimizer: the body is finished, and
        the loop ends before the next step. The state of this step is committed, and the run is
        finished: the same command trains nothing more. `break` says the same without a reason.
        Raises UsageError outside of the loop's body, and where not all ranks call it.
        """
        loop = self._loop_in_step
        if loop is None:
            raise UsageError("expected run.stop(reason) in the body of the loop, found it outside")
        loop.stop_reason = " ".join(str(reason).split())[:LONGEST_REASON] or "run.stop"

    @public("run.evaluate", is_of_all_ranks=True)
    def evaluate(
        self,
        dataset: Any,
        function: Callable[[Batch], Any],
        *,
        batch_size: int | None = None,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """The sum of function(batch) over a map-style dataset, each sample once, without gradients.

        It has the same bits on every rank and at every world size, so it may decide what becomes of
        the state: early stopping, a scheduler, which weights are kept. Every rank must call it, at
        the same place, before, in or after the loop.

        function returns sums over the samples of its batch, not means (the last batch is smaller):
        a number, a tensor, or a dict or tuple of them. Floats are added in float64 and whole
        numbers exactly; a tensor without dimensions comes back as a number. batch_size: by default
        the size of a shard; another one may give other last digits. workers, collate: as in `data`.

        Put modules into evaluation mode yourself. From `run.steps` on, the State's modules end with
        the buffers that they had, so BatchNorm in training mode changes no average. Random numbers
        are keyed by the batch and the sample, and the generators go on as if nothing had been
        drawn. Raises UsageError inside the function of a step's sum, and for values that cannot be
        added. One batch of each rank is computed a second time, on another rank where there is one:
        RecipeNotExact where its samples or its sums are then other ones.
        """
        ours, loop = self._begun.identity, self._loop_in_step
        self._begun.step_functions.refuse_inside("run.evaluate")
        self._settle()
        samples = check_dataset(dataset, "run.evaluate")
        if samples < 1 or not callable(function):
            raise UsageError(
                "expected run.evaluate(dataset, function), with at least one sample and a function of a batch, found "
                f"{samples} samples and {type(function).__name__}"
            )
        loader = BatchLoader(
            dataset=dataset,
            seed=key(ours.seed, "evaluate"),
            device=self.device,
            workers=workers,
            collate=collate,
        )
        evaluation = Evaluation(
            loader=loader,
            checksum=str if loop is None else loop.checksum,
            samples=samples,
            batch_size=whole_number("batch_size", batch_size) or ours.global_batch // ours.shards,
            modules=[] if self._state is None else self._state.modules,
            # A loop that is left early opens fresh ones.
            groups=self._worker.groups if self._loop_end is None else self._loop_end.loop.parts.groups,
            heartbeat=self._worker.heartbeat,
            sharded=self._sharded,
        )
        sharded = nullcontext() if self._sharded is None else self._sharded.evaluating()
        with nullcontext() if loop is None else loop.evaluating(), sharded:
            return evaluation.sum(function)

    def print(self, *words: object) -> None:
        """print, on rank 0 only."""
        if self._opened is None:
            self._kept.append(" ".join(map(str, words)))
        elif self.is_first:
            print(*words, flush=True)

    @public("run.event")
    def event(self, name: str, **fields: Any) -> None:
        """Add an event of the recipe's own to the run's events, from rank 0; fields are JSON.

        Raises UsageError for names of the run's own, and for fields that are no JSON.
        """
        check_event(name, fields)
        if self.is_first:
            self._worker.log.record(RecipeEvent(own_name=name, values=fields))

    @public("run.on_step")
    def on_step(self, function: Function) -> Function:
        """Call function(record) on rank 0 for each step that counts, once, also across restarts.

        For W&B, MLflow and other trackers (docs/operations.md). record: a dict, the line of
        metrics.jsonl of this step. A step that is done again is not reported a second time. What
        the function raises is shown once, and training goes on; its time is the recipe's own. It
        must not change the state, nor make calls that all ranks make. Returns the function, so
        that it serves as a decorator. Call it before run.steps; raises UsageError after that.
        """
        if self._loop_end is not None:
            raise UsageError(
                "expected run.on_step before run.steps, found it after that; a process that restarts calls the functions from its first step on"
            )
        self._begun.step_functions.add(function)
        return function

    @public("run.path")
    def path(self, name: str) -> Path:
        """Where a file of the recipe's own belongs in the run directory.

        If the run directory is a URL, in its local part. Raises UsageError for a name that leads
        out of the run directory, or that is one of the run's own files and folders.
        """
        path = self._begun.run_dir.of_recipe(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def _worker(self) -> WorkerParts:
        if self._opened is None and threading.current_thread() is threading.main_thread():
            self._open()
        self._is_open.wait()  # another thread waits until the script's own has come to it
        assert self._opened is not None
        return self._opened

    def _open(self) -> None:
        environment.read_assignment()  # a standby waits, and a signal's handler may come in between
        if self._opened is None:
            with random_streams.kept():  # the script may have built half of its model
                self._opened = self._open_worker()
            self._is_open.set()
            for line in self._kept:
                self.print(line)

    def _note_error(self, error: ElasticError, *, is_of_all_ranks: bool) -> None:
        """The recipe may catch it. Other ranks would take its next call for this one."""
        if self._loop_end is not None:
            self._loop_end.note_error(error, is_of_all_ranks=is_of_all_ranks)
        elif is_of_all_ranks:
            self._error = self._error or error

    @property
    def _loop_in_step(self) -> Loop | None:
        """None outside of a step's body, where no comparison of states follows."""
        loop = None if self._loop_end is None else self._loop_end.loop
        return None if loop is None or loop.step is None else loop

    def _settle(self) -> None:
        """Before ranks meet outside of a step: they must all have left the loop, or none."""
        refuse.use_in_forked_child()
        if self._error is not None:
            raise self._error
        if self._loop_end is not None:
            self._loop_end.settle()

    def _ended(self, loop: Loop) -> None:
        """The last state is committed: what the recipe does now is no step."""
        if self.is_first and is_alone(self._worker.link):
            # With an agent, the agent records and says it once the recipe has ended well.
            self._worker.log.record(RunFinished(steps=loop.last_step, epochs=loop.epochs, digest=loop.digest))
            if loop.stopped is not None:
                print(f"{loop.stopped}: digest {loop.digest[:16]}", flush=True)
        random_streams.enter(self._begun.identity.seed, "after")

    def _request_drain(self, _signal: int, _frame: object) -> None:
        if self._opened is not None:
            self._opened.page.drain = True
        else:  # nothing has begun
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
