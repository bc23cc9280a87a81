"""A setting that makes no sense ends with exit code 2 and a sentence before anything is started."""

import barlow
import pytest


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--global-batch", "0"], "--global-batch must be at least 1"),
        (["--shards", "-3"], "--shards must be at least 1"),
        (["--epochs", "many"], "invalid int value: 'many'"),
        (["--warmup", "1"], "--warmup is a fraction of the run"),
        (["--warmup", "nan"], "--warmup is a fraction of the run"),
        (["--lr", "-1"], "must be finite and not negative"),
        (["--lr-biases", "inf"], "must be finite"),
        (["--lambd", "nan"], "must be finite"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--data", "mnist"], "invalid choice: 'mnist'"),
        (["--data", "cifar10"], "needs --data-dir"),
        (["--data-dir", "images"], "--data digits reads none"),
        (["--projector", "256-"], "--projector is a list of widths"),
        (["--projector", "256-0"], "--projector is a list of widths"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        barlow.Settings.parse(arguments)
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        barlow.Settings.parse(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for name in (
        "epochs",
        "global-batch",
        "shards",
        "seed",
        "data",
        "data-dir",
        "arch",
        "amp",
        "workers",
        "lr-biases",
    ):
        assert f"--{name}" in text


def test_defaults_follow_arch_and_optimizer() -> None:
    settings = barlow.Settings.parse([])
    assert (settings.widths, settings.peak_lrs, settings.amp) == ([256, 256], (2e-3, 2e-3), False)
    large = barlow.Settings.parse(
        ["--arch", "resnet50", "--optimizer", "lars", "--global-batch", "256", "--amp"]
    )
    assert (large.widths, large.peak_lrs, large.amp) == ([8192] * 3, (0.2, 1.2), True)


def test_given_learning_rates_win_over_the_defaults() -> None:
    assert barlow.Settings.parse(["--lr", "0.01", "--lr-biases", "0.02"]).peak_lrs == (0.01, 0.02)
