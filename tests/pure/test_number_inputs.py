"""Numbers that a step's functions read: another one after a resume is named, none is refused."""

import json
import time
from types import SimpleNamespace

from elastic.train.frozen_inputs import FrozenInputs
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
    frozen = FrozenInputs(State(model=linear(0)), [])
    frozen.resume({}, {"SCALE": "0.7", "dataset.sigma": "0.1", "dataset.size": "3"})
    frozen.begin(4, None)
    frozen.look_at_loading([collate], {"dataset.sigma": 0.3, "dataset.size": 3, "dataset.root": "/tmp"})
    said = frozen.compare_ranks(4, SimpleNamespace(rank=0, all_gather=lambda mine: [mine]))
    assert said == ["SCALE is 0.5 and was 0.7", "dataset.sigma is 0.3 and was 0.1"]
    assert "or code that loads samples, reads other numbers than before" in capsys.readouterr().out
