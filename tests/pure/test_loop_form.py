"""The forms of a loop over the steps: those that may begin at any step, and those that may not."""

import asyncio
import contextlib
import functools
import gc
import itertools
import statistics
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.errors import UsageError
from elastic.train.loop_end import LoopEnd
from elastic.train.loop_form import LoopForm

STEPS = 6


@pytest.fixture(autouse=True)
def _only_objects_of_the_test():
    """Else each search among the objects of this process sees those of all tests."""
    gc.freeze()
    yield
    gc.unfreeze()


class Loop:
    """Asks as the library's does: from a generator of its own, below that of LoopEnd."""

    is_in_step = False

    def __init__(self):
        self.form = LoopForm()

    def run(self):
        for number in range(1, STEPS + 1):
            self.form.check(sys._getframe().f_back)
            yield number


class Run:
    def steps(self):
        return LoopEnd(Loop(), lambda: None).steps()


run = Run()


def reduced():
    return functools.reduce(lambda scale, step: 0.9 * scale + step, run.steps(), 1.0)


def mapped():
    for loss in map(float, run.steps()):
        print(loss)


def listed():
    return list(map(float, run.steps()))


def accumulated():
    for total in itertools.accumulate(
        run.steps(),
        lambda total, step: total + step,
    ):
        print(total)


def sliced():
    for step in itertools.islice(run.steps(), 4):
        print(step)


def take(number):
    return itertools.islice(enumerate(run.steps()), number)


def sliced_elsewhere():
    for step in take(4):
        print(step)


class Limited:
    def __init__(self, limit):
        self.limit = limit

    def __iter__(self):
        for _, step in zip(range(self.limit), run.steps(), strict=False):
            yield step


def zipped():
    for step in Limited(4):
        print(step)


class Handing:
    def __init__(self, steps):
        self.steps = steps

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.steps)


def sliced_object():
    for step in itertools.islice(Handing(run.steps()), 4):
        print(step)


def grouped():
    for _, steps in itertools.groupby(run.steps(), key=lambda number: number // 2):
        for step in steps:
            print(step)


def unpacked():
    first, *others = run.steps()
    return first, others


def pooled():
    with ThreadPoolExecutor(1) as pool:
        for result in pool.map(one, run.steps()):
            print(result)


def late():
    yield from run.steps()


def sliced_generator():
    for step in itertools.islice(late(), 4):
        print(step)


def sliced_later():
    steps = handed_on(late())
    part = itertools.islice(steps, 4)
    for step in part:
        print(step)


GIVEN = {
    "reduce": reduced,
    "map": mapped,
    "list": lambda: list(run.steps()),
    "list of a map": listed,
    "accumulate": accumulated,
    "islice": sliced,
    "islice of a function": sliced_elsewhere,
    "islice of an object": sliced_object,
    "zip": zipped,
    "groupby": grouped,
    "sorted": lambda: sorted(run.steps()),
    "a list": unpacked,
    "pool.map": pooled,  # which makes a zip
    "sum of a generator": lambda: sum(late()),
    "deque of a generator": lambda: deque(handed_on(late()), maxlen=0),
    "max of an object": lambda: max(Handing(late())),
    "islice of a generator": sliced_generator,
    "islice of a generator's generator": sliced_later,
}


@pytest.mark.parametrize("form", GIVEN)
def test_a_loop_that_another_function_writes_is_refused_with_its_name(form):
    """A worker that takes over counts its four steps from the one where it goes on."""
    name = form.partition(" of ")[0]
    with pytest.raises(UsageError, match=rf"given to {name}.*Write the loop as `for step in run\.steps"):
        GIVEN[form]()


def one(step):
    return 1.0 / step


COLLECTED = {
    "list": lambda: [one(step) for step in run.steps()],
    "dict": lambda: {step: one(step) for step in run.steps()},
    "set": lambda: {one(step) for step in enumerate(run.steps())},
    "sum": lambda: sum(one(step) for step in run.steps()),
    "a library's function": lambda: statistics.mean(one(step) for step in run.steps()),
}


@pytest.mark.parametrize("form", COLLECTED)
def test_a_comprehension_over_the_steps_is_refused(form):
    """What it collects is of this process alone."""
    with pytest.raises(UsageError, match=r"by a comprehension.*\(test_loop_form.py:\d+\).*elastic\.Values"):
        COLLECTED[form]()


def epochs():
    steps = iter(run.steps())
    for _epoch in range(3):
        for step in steps:
            if step % 2 == 0:
                break


def counted_by_next():
    steps = run.steps()
    for _ in range(3):
        print(next(steps, None))


def phases_by_next():
    steps = run.steps()
    for count in 2, 4:
        for _ in range(count):
            print(next(steps))


def while_around():
    steps, going = run.steps(), True
    while going:
        for step in steps:
            if step % 2 == 0:
                break
        going = step < STEPS


def train_epoch(steps):
    for step in steps:
        if step % 2 == 0:
            break


def epochs_by_function():
    steps = run.steps()
    for _epoch in range(3):
        train_epoch(steps)


def handed_on(steps):
    yield from steps


def epochs_of_generator():
    steps = handed_on(handed_on(run.steps()))
    for _epoch in range(3):
        for step in steps:
            if step % 2 == 0:
                break


def epochs_of_late_generator():
    """run.steps is called within the first pass of the outer loop."""
    steps = late()
    for _epoch in range(3):
        for step in steps:
            if step % 2 == 0:
                break


def epochs_made_in_the_first():
    steps = None
    for epoch in range(3):
        if epoch == 0:
            steps = run.steps()
        for step in steps:
            if step % 2 == 0:
                break


def comprehension_around():
    steps = run.steps()
    return [train_epoch(steps) for _epoch in range(3)]


def of_epoch(steps):
    for step in steps:
        yield step
        if step % 2 == 0:
            return


def epochs_by_generators():
    """Each pass makes a generator, and all of them take from one that run.steps was called in."""
    steps = late()
    for _epoch in range(3):
        for step in of_epoch(steps):
            print(step)


class Epochs:
    def __init__(self, steps):
        self.steps = steps

    def one(self):
        yield from of_epoch(self.steps)

    def train(self):
        for step in self.steps:
            if step % 2 == 0:
                break


def epochs_of_an_object():
    epochs = Epochs(late())
    for _epoch in range(3):
        for step in epochs.one():
            print(step)


def epochs_by_method():
    epochs = Epochs(handed_on(late()))
    for _epoch in range(3):
        epochs.train()


def epochs_of_an_alias():
    epochs = Epochs(late())
    for _epoch in range(3):
        steps = enumerate(epochs.steps)
        for _, step in steps:
            if step % 2 == 0:
                break


def epochs_of_a_default():
    def train(steps=late()):  # noqa: B008
        train_epoch(steps)

    for _epoch in range(3):
        train()


def epochs_of_a_closure():
    steps = late()

    def train():
        for step in steps:
            if step % 2 == 0:
                break

    for _epoch in range(3):
        train()


def epochs_by_a_generator_of_epochs():
    def all_epochs(steps):
        for _epoch in range(3):
            yield of_epoch(steps)

    for steps in all_epochs(late()):
        for step in steps:
            print(step)


def epochs_kept_by_a_condition():
    steps = None
    for epoch in range(3):
        steps = late() if epoch == 0 else steps
        for step in steps:
            if step % 2 == 0:
                break


def epochs_kept_by_or():
    steps = None
    for _epoch in range(3):
        steps = steps or run.steps()
        train_epoch(steps)


def epochs_kept_by_a_function():
    kept = []

    def once():
        if kept:
            return kept[0]
        kept.append(run.steps())
        return kept[0]

    for _epoch in range(3):
        steps = once()
        train_epoch(steps)


def epochs_kept_by_a_decorator():
    @functools.cache
    def once():
        return run.steps()

    for _epoch in range(3):
        train_epoch(once())


def epochs_by_map():
    steps = run.steps()
    return list(map(lambda _: train_epoch(steps), range(3)))  # noqa: C417


def epochs_by_for_over_a_map():
    steps = late()
    for trained in map(train_epoch, [steps] * 3):
        print(trained)


async def epochs_of_async_generator():
    async def following():
        for step in run.steps():
            yield step

    steps = following()
    for _epoch in range(3):
        async for step in steps:
            if step % 2 == 0:
                break


def epochs_in_asyncio():
    asyncio.run(epochs_of_async_generator())


AROUND = {
    each.__name__: each
    for each in (
        epochs,
        counted_by_next,
        phases_by_next,
        while_around,
        epochs_by_function,
        epochs_of_generator,
        epochs_of_late_generator,
        epochs_made_in_the_first,
        comprehension_around,
        epochs_by_generators,
        epochs_of_an_object,
        epochs_by_method,
        epochs_of_an_alias,
        epochs_of_a_default,
        epochs_of_a_closure,
        epochs_by_a_generator_of_epochs,
        epochs_kept_by_a_condition,
        epochs_kept_by_or,
        epochs_kept_by_a_function,
        epochs_kept_by_a_decorator,
        epochs_by_map,
        epochs_by_for_over_a_map,
        epochs_in_asyncio,
    )
}


@pytest.mark.parametrize("form", AROUND)
def test_a_loop_around_the_loop_over_the_steps_is_refused(form):
    """A worker that takes over begins the outer loop again, at whichever step it goes on."""
    with pytest.raises(
        UsageError, match=r"\(test_loop_form.py:\d+\) inside of a loop \(line \d+\).*step\.ends_epoch"
    ):
        AROUND[form]()


def one_after_the_other():
    steps = run.steps()
    for step in steps:
        if step == 2:
            break
    for step in steps:
        print(step)


def first_apart():
    steps = run.steps()
    first = next(steps)
    for step in steps:
        print(first, step)


def first_apart_with_while():
    steps = run.steps()
    step = next(steps, None)
    print("warm-up", step)
    while step is not None:
        step = next(steps, None)


def two_in_a_body():
    steps = run.steps()
    while True:
        print(next(steps))
        print(next(steps))


def fit(steps, depth):
    step = next(steps, None)
    return depth if step is None else fit(steps, depth + 1)


def recursion():
    return fit(run.steps(), 1)


@pytest.mark.parametrize(
    "loop", [one_after_the_other, first_apart, first_apart_with_while, two_in_a_body, recursion]
)
def test_steps_that_are_asked_for_in_two_places_are_refused(loop):
    """A worker that takes over is in the first phase again, at a step of the second."""
    with pytest.raises(UsageError, match=r"two places \(test_loop_form.py:\d+, test_loop_form.py:\d+\)"):
        loop()


def plain():
    return sum_of(run.steps())


def sum_of(steps):
    total = 0
    for step in steps:
        total += step
    return total


def counted():
    total = 0
    for _, step in enumerate(run.steps()):
        total += step
    return total


def generated():
    total = 0
    for step in handed_on(run.steps()):
        total += step
    return total


def by_while():
    steps, total = run.steps(), 0
    while (step := next(steps, None)) is not None:
        total += step
    return total


def by_endless_while():
    steps, total = run.steps(), 0
    while True:
        try:
            total += next(steps)
        except StopIteration:
            return total


def by_function_and_while():
    steps, total = run.steps(), 0

    def following():
        return next(steps, 0)

    while step := following():
        total += step
    return total


def by_the_same_line():
    steps, total = run.steps(), 0
    step = next(steps, None)
    while step is not None:
        total += step
        step = next(steps, None)
    return total


def of_an_object():
    total = 0
    for step in Handing(run.steps()):
        total += step
    return total


def of_one_fold():
    """Its outer loop calls run.steps in its pass, and so does that of a worker that takes over."""
    for fold in range(3):
        if fold != 1:
            continue
        total = plain()
    return total


def of_one_fold_by_generator():
    for fold in range(3):
        total = 0
        if fold == 1:
            for step in late():
                total += step
            return total
    return 0


def with_loops_inside():
    total = 0
    for step in run.steps():
        for _ in range(3):
            total += step / 3
    return round(total)


def by_bound_next():
    total, following = 0, run.steps().__next__
    with contextlib.suppress(StopIteration):
        while True:
            total += following()
    return total


def by_partial():
    total, following = 0, functools.partial(next, run.steps(), None)
    for step in iter(following, None):
        total += step
    return total


def of_one_main():
    """The loop around calls a function, and what that one iterates over calls run.steps."""
    for _seed in range(1):
        total = sum_of(handed_on(late()))
    return total


def of_one_main_that_is_left():
    while True:
        total = of_one_main()
        break
    return total


def of_some_mains():
    return [sum_of(late()) for _name in ["a"]][0] + sum(map(sum_of, []))  # noqa: RUF015


def of_another_branch():
    total = 0
    for name in ["a", "b"]:
        if name == "a":
            steps = run.steps()
        else:
            continue
        for step in steps:
            total += step
    return total


def of_one_of_two_branches():
    total = 0
    for name in ["a"]:
        if name == "a":
            steps = late()
        elif name == "b":
            steps = handed_on(late())
        else:
            raise ValueError(name)
        try:
            bar = enumerate(steps)
        except TypeError:
            continue
        for _, step in bar:
            total += step
    return total


class Trainer:
    def begin(self):
        self.steps, self.total = run.steps(), 0

    def fit(self):
        self.begin()
        for step in self.steps:
            self.total += step
        return self.total

    def batches(self):
        yield from run.steps()

    def fit_batches(self):
        self.loader = self.batches()
        return sum_of(self.loader)


def of_a_trainer():
    trainer = Trainer()
    for fold in range(2):
        if fold == 1:
            total = trainer.fit()
    return total


def of_a_trainers_generator():
    trainer = Trainer()
    for fold in range(2):
        if fold == 1:
            total = trainer.fit_batches()
    return total


def of_a_context():
    @contextlib.contextmanager
    def training():
        yield run.steps()

    for _seed in range(1):
        with training() as steps:
            total = sum_of(steps)
    return total


def of_a_dict():
    loaders = {}
    for fold in range(2):
        if fold == 0:
            continue
        loaders[fold] = late()
        total = sum_of(loaders[fold])
    return total


@pytest.mark.parametrize(
    "loop",
    [
        plain,
        counted,
        generated,
        by_while,
        by_endless_while,
        by_function_and_while,
        by_the_same_line,
        of_an_object,
        of_one_fold,
        of_one_fold_by_generator,
        with_loops_inside,
        by_bound_next,
        by_partial,
        of_one_main,
        of_one_main_that_is_left,
        of_some_mains,
        of_another_branch,
        of_one_of_two_branches,
        of_a_trainer,
        of_a_trainers_generator,
        of_a_context,
        of_a_dict,
    ],
)
def test_a_loop_that_may_begin_at_any_step_is_left_alone(loop):
    assert loop() == sum(range(1, STEPS + 1))


def test_a_recipe_without_a_text_is_checked_as_far_as_objects_tell():
    """It came from `exec`: nothing can be said of a loop around it."""
    names = {"run": run, "islice": itertools.islice}
    exec("for epoch in range(2):\n  steps = run.steps()\n  for step in steps: pass", names)
    with pytest.raises(UsageError, match="islice"):
        exec("for step in islice(run.steps(), 2): pass", names)
