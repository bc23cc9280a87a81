"""A setting of a recipe that makes no sense ends it with exit code 2 and a sentence."""

import barlow
import classify
import gpt
import pytest


@pytest.mark.parametrize(
    ("recipe", "arguments", "sentence"),
    [
        (barlow, "--epochs 0", "--epochs must be at least 1, not 0"),
        (barlow, "--warmup nan", "--warmup is a fraction of the run"),
        (barlow, "--lr-biases inf", "must be finite"),
        (barlow, "--data cifar10", "needs --data-dir"),
        (barlow, "--data-dir images", "--data digits reads none"),
        (barlow, "--projector 256-", "--projector is a list of widths"),
        (classify, "--warmup 1", "are fractions in [0, 1)"),
        (classify, "--data cifar10", "need --data-dir"),
        (gpt, "--text no/such/file", "is not a file"),
        (gpt, "--heads 5", "--heads must divide --width"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(recipe, arguments, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        recipe.Settings.parse(arguments.split())
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


def test_defaults_follow_arch_and_optimizer():
    settings = barlow.Settings.parse([])
    assert (settings.widths, settings.peak_lrs, settings.amp) == ([256, 256], (2e-3, 2e-3), False)
    large = barlow.Settings.parse(
        ["--arch", "resnet50", "--optimizer", "lars", "--global-batch", "256", "--amp"]
    )
    assert (large.widths, large.peak_lrs, large.amp) == ([8192] * 3, (0.2, 1.2), True)
    assert barlow.Settings.parse(["--lr", "0.01", "--lr-biases", "0.02"]).peak_lrs == (0.01, 0.02)
