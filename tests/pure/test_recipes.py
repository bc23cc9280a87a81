"""The recipes' own mathematics beside plain restatements, and settings that make no sense."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy import Lazy
from PIL import Image
from torch import nn

from elastic.errors import UsageError

LAMBD = 0.005
barlow, barlow_data, barlow_probe = Lazy("barlow"), Lazy("barlow_data"), Lazy("barlow_probe")
classify, gpt = Lazy("classify"), Lazy("gpt")


def plain_loss(a, b):
    """The paper's formula on all samples at once: batch norm without affine, correlation, two sums;
    over D.
    """
    norm = nn.BatchNorm1d(a.shape[1], affine=False).double()
    c = norm(a.double()).T @ norm(b.double()) / len(a)
    on = sum((c[i, i] - 1) ** 2 for i in range(len(c)))
    off = sum(c[i, j] ** 2 for i in range(len(c)) for j in range(len(c)) if i != j)
    return (on + LAMBD * off) / len(c)


def network():
    return barlow.build_model(barlow.Settings.parse(["--projector", "12-6"]), channels=1, small_images=True)


def test_loss_equals_the_formula_of_the_paper():
    """From sums of each shard. Embeddings far from zero mean: a variance computed as a difference
    of float32 sums would be visibly wrong here. A feature without variance must not make it 0 / 0.
    """
    torch.manual_seed(0)
    a, b = torch.randn(64, 5) + 300, torch.randn(64, 5) - 300
    sums = [barlow.correlation_sums(one, other) for one, other in zip(a.chunk(3), b.chunk(3), strict=True)]
    found = barlow.barlow_loss(torch.stack(sums).sum(0), count=64, dim=5, lambd=LAMBD)
    torch.testing.assert_close(found.loss, plain_loss(a, b), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.loss, found.on_diag + LAMBD * found.off_diag)
    a[:, 2] = 7.0
    dead = barlow.barlow_loss(barlow.correlation_sums(a, a), count=64, dim=5, lambd=LAMBD)
    assert torch.isfinite(dead.loss)


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_lars_moves_as_its_restatement(adapt, start):
    """Several steps, because of the momentum; also from zero, where the trust ratio must be 1."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(3, 4) * start)
    p, mu = parameter.detach().clone(), torch.zeros(3, 4)
    group = {"params": [parameter], "weight_decay": 0.01, "adapt": adapt}
    optimizer = Lazy("barlow_lars").LARS([group], lr=0.3)
    for gradient in [*(torch.randn(3, 4) for _ in range(4)), torch.zeros(3, 4)]:
        d = gradient + 0.01 * p
        if adapt and float(p.norm()) > 0 and float(d.norm()) > 0:
            d = d * (0.001 * p.norm() / d.norm())
        mu = 0.9 * mu + d
        p = p - 0.3 * mu
        parameter.grad = gradient
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), p)


def test_learning_rates_follow_the_batch_and_the_schedule():
    lars = barlow.Settings.parse(["--optimizer", "lars", "--global-batch", "512", "--warmup", "0"])
    optimizer = barlow.build_optimizer(network(), lars)
    assert barlow.set_learning_rates(optimizer, 0.0, lars) == pytest.approx((0.4, 2.4))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 2.4])
    shares = [barlow.lr_share(at, warmup=0.1) for at in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert shares == pytest.approx([0.0, 0.5, 1.0, 0.5 + 0.5 * 0.001, 0.001])


@settings(max_examples=20)
@given(st.integers(0, 2**31))
def test_augmented_digit_is_a_function_of_its_own_numbers(seed):
    """The same sample alone, and in a batch after other draws of the global generator. At 0.5 there
    is no rotation, shift or noise: an augmentation that is off-centre fails.
    """
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(5, 1, 8, 8, generator=generator)
    draws = torch.rand(5, barlow_data.DIGIT_DRAWS, generator=generator)
    together = barlow_data.augment_digits(images, draws)
    torch.rand(3)
    alone = barlow_data.augment_digits(images[2:3], draws[2:3])
    assert together.shape == images.shape and not torch.allclose(together, images)
    torch.testing.assert_close(together[2:3], alone, rtol=0, atol=1e-6)
    middle = torch.full((5, barlow_data.DIGIT_DRAWS), 0.5)
    torch.testing.assert_close(barlow_data.augment_digits(images, middle), images)


def test_image_folder_is_read(tmp_path):
    """Labels are places in the sorted list of folders: other folders would silently mean other
    classes.
    """
    for folder, count in (("train/cat", 24), ("train/dog", 24), ("val/cat", 3), ("val/dog", 3)):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (30, 40)).save(tmp_path / folder / f"{number}.png")
    source = barlow_data.load_data("imagefolder", tmp_path)
    image, label = source.pool[47 - 8]
    assert image.shape == (3, 224, 224) and label == 1
    assert (len(source.train), len(source.pool), len(source.test)) == (48, 40, 6)
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "emu")
    with pytest.raises(UsageError, match="must be the same in both"):
        barlow_data.load_data("imagefolder", tmp_path)


def test_probe_leaves_a_training_backbone_training_and_unchanged():
    """A probe in training mode would move BatchNorm's averages, and so change what it measures."""
    source = barlow_data.load_data("digits", Path())
    backbone = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 8))
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    score = barlow_probe.probe_backbone(backbone, source, torch.device("cpu"))
    assert backbone.training
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())
    assert score == barlow_probe.probe_backbone(backbone, source, torch.device("cpu"))
    assert 0.1 < score.linear < 1


def test_a_score_depends_on_no_later_character():
    """One character is exchanged: what stands before it has the same scores as before."""
    torch.manual_seed(0)
    small = ["--width", "16", "--heads", "2", "--context", "12", "--layers", "2"]
    model = gpt.GPT(gpt.Settings.parse(small), 7).eval()
    tokens = torch.randint(7, (1, 12))
    other = tokens.clone()
    other[0, 8] = (other[0, 8] + 1) % 7
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :8], after[:, :8]) and not torch.equal(before[:, 8:], after[:, 8:])


def test_windows_lie_in_their_own_stretch(tmp_path):
    windows = gpt.Windows(torch.arange(100), 10)
    assert len(windows) == 8
    for i in range(len(windows)):
        window = windows[i].tolist()
        assert 10 * i <= window[0] < 10 * (i + 1) and window == list(range(window[0], window[0] + 11))
    (tmp_path / "text").write_text("abcd" * 250)
    text = gpt.Text.read(str(tmp_path / "text"))
    (pieces,) = text.windows(12).tensors
    assert (len(text.train), len(text.held_out)) == (900, 100)
    assert torch.equal(pieces[:, :-1].flatten(), text.held_out[: 12 * len(pieces)])


@pytest.mark.parametrize(
    ("recipe", "arguments", "sentence"),
    [
        (barlow, "--epochs 0", "--epochs must be at least 1, not 0"),
        (barlow, "--warmup nan", "--warmup is a fraction of the run"),
        (barlow, "--data-dir images", "--data digits reads none"),
        (classify, "--warmup 1", "are fractions in [0, 1)"),
        (gpt, "--heads 5", "--heads must divide --width"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(recipe, arguments, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        recipe.Settings.parse(arguments.split())
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err
