"""The classifier's settings are refused in a sentence, and its images are varied as it says."""

import classify
import pytest
import torch
from classify_data import load_images, shifted


class Drawn:
    """A batch whose uniform numbers are chosen by the test."""

    def __init__(self, images, draws):
        self.parts = images, torch.zeros(len(images), dtype=torch.int64)
        self.draws = draws

    def __iter__(self):
        return iter(self.parts)

    def uniform(self, count):
        assert count == self.draws.shape[1]
        return self.draws


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--patience", "0"], "--patience must be at least 1"),
        (["--lr", "nan"], "must be finite"),
        (["--warmup", "1"], "are fractions in [0, 1)"),
        (["--data", "cifar10"], "need --data-dir"),
        (["--data-dir", "images"], "reads none"),
        (["--arch", "vgg"], "invalid choice: 'vgg'"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        classify.Settings.parse(arguments)
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["mlp", "small", "resnet18"])
def test_every_network_gives_a_score_for_each_class(arch):
    images = load_images("digits", None)
    model = classify.build_model(classify.Settings.parse(["--arch", arch]), images)

    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_an_image_moves_by_at_most_one_pixel():
    """0 moves it a pixel one way, one half leaves it where it is."""
    image = torch.zeros(2, 1, 8, 8)
    image[:, 0, 4, 4] = 1.0

    moved, _ = shifted(Drawn(image, torch.tensor([[0.5, 0.5], [0.0, 0.5]])))

    assert torch.equal(moved[0], image[0])
    assert torch.allclose(moved[1, 0], image[1, 0].roll(1, dims=1), atol=1e-6)


def test_biases_and_norms_have_no_weight_decay():
    settings = classify.Settings.parse(["--optimizer", "sgd"])
    model = classify.small_network(1, 10)

    weights, others = classify.build_optimizer(model, settings).param_groups

    assert (weights["weight_decay"], others["weight_decay"]) == (settings.weight_decay, 0.0)
    assert {p.ndim for p in others["params"]} == {1}
    assert len(weights["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_the_learning_rate_rises_and_falls_to_zero():
    shares = [classify.lr_share(fraction / 100, 0.1) for fraction in range(100)]

    assert shares[0] == 0.0
    assert max(shares) == shares[10] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] < 0.001
