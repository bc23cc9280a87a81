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
]


@pytest.mark.parametrize("drawn", FOUND)
def test_what_draws_without_a_seed_is_found_with_its_line(drawn):
    assert unseeded_in(f"import elastic\nx = {drawn}\n".encode()) == [(2, drawn)]


@pytest.mark.parametrize("line", LEFT_ALONE)
def test_what_has_a_seed_or_is_only_shown_is_left_alone(line):
    assert unseeded_in(f"import elastic\n{line}\n".encode()) == []
