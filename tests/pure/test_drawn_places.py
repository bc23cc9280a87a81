"""Generators that are seeded from the operating system, as the calls of a recipe show them."""

import copy
import linecache
import pickle
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from elastic.events import DrawnWithoutSeed
from elastic.observe.began_again import drawn_without_seed
from elastic.system import unseeded_calls
from elastic.train.drawn_places import DrawnPlaces

PATH = "/recipes/recipe.py"
FOUND = {
    "np.random.default_rng(SEED)": "np.random.default_rng(SEED)",
    "np.random.default_rng(seed=CFG['seed'])": "np.random.default_rng(seed=CFG['seed'])",
    "np.random.RandomState(SEED)": "np.random.RandomState(SEED)",
    "np.random.RandomState(0).seed(SEED)": "np.random.RandomState(0).seed(SEED)",
    "np.random.Generator(np.random.PCG64(SEED))": "np.random.PCG64(SEED)",
    "made()": "made()",
    "random.Random(SEED)": "random.Random(SEED)",
    "R()": "R()",
    "random.seed(SEED)": "random.seed(SEED)",
    "qmc.LatinHypercube(d=2).random(4)": "qmc.LatinHypercube(d=2)",
    "qmc.LatinHypercube(d=2, seed=SEED, optimization='random-cd', strength=1)": "LatinHypercube(...)",
}
LEFT_ALONE = [
    "np.random.default_rng(3)",
    "np.random.RandomState(3)",
    "np.random.RandomState([1, 2])",
    "np.random.RandomState(np.arange(3))",
    "np.random.seed(3)",
    "KMeans(2, n_init=1, random_state=3).fit(np.eye(4))",
    "random.Random('a')",
    "random.seed(3)",
    "np.random.rand(), random.random(), np.random.shuffle([1, 2])",
    "copy.deepcopy(SEEDED)",
    "copy.copy(SEEDED)",
    "pickle.loads(pickle.dumps(SEEDED))",
    "np.random.PCG64(1).jumped()",
    "np.random.default_rng(3).spawn(2)",
    "tempfile.TemporaryDirectory().cleanup()",
    "random.Random(3).getstate()",
]
TOP = """import copy, pickle, random, tempfile
import numpy as np
from numpy.random import default_rng as made
from random import Random as R
from scipy.stats import qmc
from sklearn.cluster import KMeans

SEED, CFG = None, dict(seed=None)
SEEDED = dict(a=np.random.default_rng(1), b=np.random.RandomState(1), c=random.Random(1))
"""


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """As from a recipe's first line on."""
    for owner, name in (
        (random.Random, "seed"),
        (random, "seed"),
        (np.random.bit_generator, "randbits"),
        (np.random._mt19937, "operator"),
        (unseeded_calls, "_stacks"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(unseeded_calls, "_stacks", {})
    unseeded_calls.watch_python()
    unseeded_calls.watch_numpy(np.random)


def run(lines, names=None):
    text = TOP + lines + "\n"
    linecache.cache[PATH] = len(text), None, text.splitlines(keepends=True), PATH
    found = {} if names is None else names
    exec(compile(text, PATH, "exec"), found)
    return found


@pytest.fixture(autouse=True)
def texts(monkeypatch):
    """Each recipe here has another text under the same path."""
    from elastic.train import text_place

    text_place._tree.cache_clear()
    text_place.place_at.cache_clear()
    yield
    text_place._tree.cache_clear()


@pytest.mark.parametrize("call", FOUND)
def test_a_call_whose_seed_is_none_is_named_with_its_line(call):
    """A text does not show the value of a variable, nor what a library makes."""
    places = DrawnPlaces()
    assert not places.has_new()
    run(call)
    assert places.has_new()
    assert places.new() == [f"recipe.py:10 ({FOUND[call]})"]


@pytest.mark.parametrize("call", LEFT_ALONE)
def test_seeded_generators_their_copies_and_those_that_libraries_make_for_names_are_left_alone(call):
    run(call)
    assert DrawnPlaces().new() == []


def test_a_generator_in_an_object_of_the_recipe_is_named_where_the_object_makes_it():
    """By an argument's default, a parser's or a dataclass's: also in a step, and once."""
    places = DrawnPlaces()
    made = run(
        """from dataclasses import dataclass, field
class Init:
    def __init__(self, seed=None):
        self.rng = np.random.default_rng(seed)
@dataclass
class Config:
    rng: object = field(default_factory=np.random.default_rng)
Init(), Init(3)
class Own(random.Random):
    pass"""
    )
    assert places.new() == ["recipe.py:13 (np.random.default_rng(seed))"]
    linecache.cache["/recipes/loop.py"] = 0, None, ["Init()\n", "Config()\n", "Own()\n"], "/recipes/loop.py"
    exec(compile("Init()\nConfig()\nOwn()\n", "/recipes/loop.py", "exec"), made)
    assert places.new() == ["loop.py:2 (Config())", "loop.py:3 (Own())"]
    assert not places.has_new()


def test_a_line_that_the_text_shows_is_given_once():
    places = DrawnPlaces()
    run("np.random.default_rng()")
    assert places.new(["recipe.py:10 (np.random.default_rng())", "recipe.py:20 (uuid4())"]) == [
        "recipe.py:10 (np.random.default_rng())",
        "recipe.py:20 (uuid4())",
    ]
    run("np.random.default_rng()")
    assert places.new() == []


def test_what_a_library_makes_at_its_import_is_left_alone(tmp_path, monkeypatch):
    """And what a recipe's own module makes at its import is not."""
    library = tmp_path / "site-packages"
    library.mkdir()
    line = "import numpy as np\nSEED = None\nnp.random.default_rng(SEED)\n"
    (library / "makes_one_at_import.py").write_text(line)
    (tmp_path / "own_module_at_import.py").write_text(line)
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.syspath_prepend(str(tmp_path))
    run("import makes_one_at_import, own_module_at_import")
    assert DrawnPlaces().new() == ["own_module_at_import.py:3 (np.random.default_rng(SEED))"]


def test_a_line_that_once_has_a_seed_and_once_has_none_is_named():
    run("for SEED in (1, None, 2): np.random.RandomState(SEED)")
    assert DrawnPlaces().new() == ["recipe.py:10 (np.random.RandomState(SEED))"]


def test_a_version_of_numpy_that_seeds_in_another_way_is_not_watched():
    """Else each seeded RandomState would be named."""

    def draw(_):
        return 1

    other = SimpleNamespace(
        bit_generator=SimpleNamespace(randbits=draw), _mt19937=SimpleNamespace(operator=SimpleNamespace())
    )
    other._mt19937.operator.index = index = int
    other.RandomState = lambda _seed: other.bit_generator.randbits(128)
    unseeded_calls.watch_numpy(other)
    assert (other.bit_generator.randbits, other._mt19937.operator.index) == (draw, index)
    assert unseeded_calls.number() == 0


def test_generators_are_what_they_were():
    """Watched or not: classes, copies, signatures and numbers."""
    assert isinstance(random.Random(3), random.Random)
    assert type(np.random.default_rng(3)) is np.random.Generator
    assert random.Random(3).random() == pickle.loads(pickle.dumps(random.Random(3))).random()
    assert copy.deepcopy(np.random.default_rng(3)).random() == np.random.default_rng(3).random()
    random.seed(a="a", version=1)
    first = random.random()
    partial(random.seed, "a", 1)()
    assert random.random() == first
    assert np.random.default_rng().random() != np.random.default_rng().random()


def test_the_last_line_has_the_places_of_the_text_as_it_was_read_last_and_of_calls_since():
    def events(*records):
        made = (DrawnWithoutSeed(places=places, is_more=more) for places, more in records)
        return [SimpleNamespace(event=each) for each in made]

    first, second, third = "a.py:1 (seed())", "a.py:2 (uuid4())", "a.py:3 (Random(s))"
    assert drawn_without_seed(events(([first], False), ([third], True), ([third], True))) == [first, third]
    assert drawn_without_seed(events(([first], False), ([third], True), ([second], False))) == [second]
