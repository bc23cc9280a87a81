"""Lines of recipes that draw from the operating system or the clock, and lines that do not."""

import pytest

from elastic.train.unseeded import unseeded_in

FOUND = [
    "np.random.default_rng()",
    "default_rng(None)",
    "np.random.RandomState(seed=None)",
    "torch.seed()",
    "random.seed()",
    "np.random.seed()",
    "generator.seed()",
    "random.Random()",
    "uuid.uuid4()",
    "os.urandom(4)",
    "secrets.token_bytes(4)",
    "random.SystemRandom()",
    "parser.add_argument('--seed', default=int(time.time()))",
    "os.getpid()",
    "random.seed(time.time())",
    "torch.manual_seed(int(time.time()))",
    "np.random.default_rng(time.time_ns() % 1000)",
]
LEFT_ALONE = [
    "x = np.random.default_rng((seed, step.number))",
    "x = random.Random(0)",
    "torch.manual_seed(0)",
    "random.seed(step.number)",
    "x = np.random.RandomState(seed=1)",
    "print(uuid.uuid4())",
    "x = f'{uuid.uuid4()}'",
    "def seed(): pass\nseed()",
    "x = seed",
    "began = time.time()",
    "print('of', os.getpid(), time.time())",
    "seed = 3; began = time.time()",
]


@pytest.mark.parametrize("drawn", FOUND)
def test_what_draws_without_a_seed_is_found_with_its_line(drawn):
    assert unseeded_in(f"import elastic\nx = {drawn}\n".encode()) == [(2, drawn)]


@pytest.mark.parametrize("line", ["SEED = int(time.time())", "args.seed = datetime.now().microsecond"])
def test_a_seed_by_the_clock_is_found_where_it_gets_its_name(line):
    """It is used elsewhere, perhaps in another file."""
    assert unseeded_in(f"import elastic\n{line}\n".encode()) == [(2, line)]


def test_a_function_that_an_import_names_otherwise_is_found():
    text = b"from numpy.random import default_rng as made\nfrom os import urandom as entropy\nmade()\nentropy(4)\nmade(3)\n"
    assert unseeded_in(text) == [(3, "made()"), (4, "entropy(4)")]


@pytest.mark.parametrize("line", LEFT_ALONE)
def test_what_has_a_seed_or_is_only_shown_is_left_alone(line):
    assert unseeded_in(f"import elastic\n{line}\n".encode()) == []


@pytest.mark.parametrize(
    "text",
    [
        "def track(record):\n    log(uuid.uuid4())\nrun.on_step(track)",
        "@run.on_step\ndef track(record):\n    log(uuid.uuid4())",
        "run.on_step(lambda record: log(uuid.uuid4()))",
        "class Track:\n    def __call__(self, record):\n        log(uuid.uuid4())\nrun.on_step(Track())",
    ],
)
def test_a_function_of_on_step_may_draw_what_it_likes(text):
    assert unseeded_in(f"import elastic\n{text}\n".encode()) == []
    assert unseeded_in(f"import elastic\n{text}\nx = uuid.uuid4()\n".encode()) == [
        (text.count("\n") + 3, "uuid.uuid4()")
    ]
