"""Numbers that a step's functions read: another one after a resume is named, none is refused."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from elastic.train.frozen_inputs import FrozenInputs
from elastic.train.number_inputs import MANY_NUMBERS
from elastic.train.state import State
from tests.pure.test_frozen_inputs import Generation, linear


class CFG:
    temperature = 0.5
    started = 0.0


def by_a_variable(run, temperature):
    model, begun, workers = linear(0), time.time() + temperature, 2
    for step in run.steps(model=model):
        step.mean_loss(lambda x: (model(x) / temperature, begun, workers))


def by_a_class(run, temperature):
    model, CFG.temperature = linear(0), temperature

    def loss(x):
        return model(x) / CFG.temperature

    for step in run.steps(model=model):
        step.mean_loss(loss)


def by_a_namespace_and_a_helper(run, temperature):
    model, args = linear(0), SimpleNamespace(temperature=temperature, name="a")

    def scaled(x):
        return x / args.temperature

    def loss(x):
        return scaled(model(x))

    for step in run.steps(model=model):
        step.mean_loss(loss)


def by_a_file_of_settings(run, temperature):
    model, settings = linear(0), json.loads(json.dumps({"temperature": temperature, "path": "/tmp/a"}))
    for step in run.steps(model=model):
        step.mean_loss(lambda x: model(x) / settings["temperature"])


def by_the_loop(run, temperature):
    model, scale = linear(0), temperature

    def loss(x):
        return model(x) * scale

    for step in run.steps(model=model):
        scale = temperature / step.number
        step.mean_loss(loss)


NAMES = {
    by_a_variable: "temperature",
    by_a_class: "CFG.temperature",
    by_a_namespace_and_a_helper: "args.temperature",
    by_a_file_of_settings: "settings['temperature']",
}


def notes(recipe, before, after, capsys):
    first = Generation()
    recipe(first, before)
    capsys.readouterr()
    recipe(Generation(4, first.saved[3], numbers=first.numbers), after)
    return capsys.readouterr().out


def test_a_number_that_is_another_one_after_a_resume_is_named_with_both_values(capsys):
    for recipe, name in NAMES.items():
        assert f"before this restart: {name} is 0.7 and was 0.5. If" in notes(recipe, 0.5, 0.7, capsys)


def test_the_same_numbers_readings_of_clocks_and_what_the_loop_writes_are_not_named(capsys):
    for recipe in NAMES:
        assert notes(recipe, 0.5, 0.5, capsys) == ""
    assert notes(by_the_loop, 0.5, 0.7, capsys) == ""


def test_a_number_that_is_put_back_later_is_named_again(capsys):
    """Edited, resumed, edited back, resumed: each process is compared with the one before it."""
    first = Generation()
    by_a_variable(first, 0.5)
    edited = Generation(4, first.saved[3], last=5, numbers=first.numbers)
    by_a_variable(edited, 0.7)
    capsys.readouterr()
    by_a_variable(Generation(6, edited.saved[5], numbers=edited.numbers), 0.5)
    assert "before this restart: temperature is 0.5 and was 0.7. If" in capsys.readouterr().out


SCALE = 0.5


def collate(samples):
    return sum(samples) * SCALE


def test_numbers_that_collate_reads_or_the_dataset_was_built_with_are_named_after_a_resume(capsys):
    """The script now builds Noisy(sigma=0.3), as a file of settings says."""
    frozen = FrozenInputs(State(model=linear(0)), [], "NEW_RUN")
    frozen.resume({}, {"SCALE": "0.7", "dataset.sigma": "0.1", "dataset.size": "3"})
    frozen.begin(4, None)
    frozen.look_at_loading([collate], {"dataset.sigma": 0.3, "dataset.size": 3, "dataset.root": "/tmp"})
    said = frozen.compare_ranks(4, SimpleNamespace(rank=0, all_gather=lambda mine: [mine]))
    assert said == ["SCALE is 0.5 and was 0.7", "dataset.sigma is 0.3 and was 0.1"]
    assert "or code that loads samples, reads other numbers than before" in capsys.readouterr().out


class Settings:
    """Numbers by name, as attributes."""

    def __init__(self, **numbers):
        vars(self).update(numbers)


def by_an_object(run, settings):
    model = linear(0)
    for step in run.steps(model=model):
        step.mean_loss(lambda x: (model(x), settings.k, settings.mine))


A_PID = 4321


class Ranks:
    """The processes of one generation, each in a thread; they exchange JSON, as processes do."""

    def __init__(self, workers):
        self.workers = workers
        self.met = threading.Barrier(workers, timeout=60)
        self.messages = [""] * workers

    def groups(self, rank):
        def all_gather(mine):
            self.messages[rank] = json.dumps(mine)
            self.met.wait()
            found = [json.loads(text) for text in self.messages]
            self.met.wait()
            return found

        return SimpleNamespace(rank=rank, world_size=self.workers, all_gather=all_gather)

    def train(self, recipe, settings_of, numbers=None):
        """One step. settings_of: a function of rank and pid. Returns what each saves as numbers."""

        def one(rank):
            pid = A_PID + rank
            run = Generation(7, last=7, numbers=numbers, groups=self.groups(rank), pid=pid)
            try:
                recipe(run, settings_of(rank, pid))
            except BaseException:
                self.met.abort()  # the others would wait for this rank
                raise
            return run.numbers

        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(one, range(self.workers)))


@pytest.mark.parametrize("k", [0, 1, 2, A_PID, A_PID + 1])
@pytest.mark.parametrize("there", [{}, {"settings.k": "2"}, {"settings.k": "5", "gone": "7"}])
def test_a_number_that_equals_one_ranks_own_is_kept_by_all_ranks_alike(k, there):
    """A global K = 2 of the recipe, and three workers, one of which is rank 2: what stands beside
    the state is compared between ranks, so a rank that left K out would end the run.
    """
    saved = Ranks(3).train(by_an_object, lambda _rank, _pid: Settings(k=k, mine=0.5), there)
    assert saved == 3 * [there | {"settings.k": str(k), "settings.mine": "0.5"}]


def test_a_hyperparameter_that_equals_one_ranks_own_number_is_named_where_it_is_edited(capsys):
    there = {"settings.k": "5"}
    Ranks(3).train(by_an_object, lambda _rank, _pid: Settings(k=2, mine=0.5), there)
    assert "before this restart: settings.k is 2 and was 5. If" in capsys.readouterr().out


OWN = {
    "the rank": lambda rank, _pid: rank,
    "the process id": lambda _rank, pid: pid,
    "whether it is rank 0": lambda rank, _pid: rank == 0,
    "a variable of one rank": lambda rank, _pid: None if rank else 17,
}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("there", [{}, {"settings.mine": "2"}])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_number_that_differs_between_ranks_is_kept_by_none(own, there, workers, capsys):
    """there: a run of one worker may have kept it."""
    saved = Ranks(workers).train(by_an_object, lambda *of: Settings(k=9, mine=OWN[own](*of)), there)
    assert saved == workers * [{"settings.k": "9"}]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_is_not_named_after_a_resume_with_others(workers, capsys):
    there = {"settings.k": "9"}
    saved = Ranks(workers).train(by_an_object, lambda *_: Settings(k=9, mine=workers), there)
    assert saved == workers * [there]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("workers", [2, 3])
def test_ranks_keep_the_same_of_very_many_numbers_when_some_are_a_ranks_own(workers):
    """Eighty numbers, three of them 0, and one name that is the rank: a rank that left out its own
    ones before the list is cut would keep others at its end.
    """
    names = [f"a{index:02}" for index in range(80)]

    def settings_of(rank, _pid):
        numbers = {name: 0 if index in (3, 40, 70) else 5 + index for index, name in enumerate(names)}
        return Settings(**numbers | {"a10": rank})

    source = f"lambda settings: lambda x: ({', '.join(f'settings.{name}' for name in names)})"
    loss_of = eval(compile(source, __file__, "eval"), {})

    def recipe(run, settings):
        loss = loss_of(settings)
        for step in run.steps(model=linear(0)):
            step.mean_loss(loss)

    saved = Ranks(workers).train(recipe, settings_of)
    assert saved == workers * [saved[0]]
    assert list(saved[0]) == [f"settings.{name}" for name in names if name != "a10"][:MANY_NUMBERS]
