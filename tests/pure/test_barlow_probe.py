"""The probe measures features and nothing else; the backbone's file is whole and needs no pickle to
be trusted.
"""

from pathlib import Path

import barlow_data
import barlow_probe
import numpy as np
import torch

LABELS = np.repeat(np.arange(4), 30)


def clusters(spread: float) -> np.ndarray:
    """Four groups of points on the corners of a square."""
    corners = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=np.float64)
    return corners[LABELS] + spread * np.random.default_rng(0).standard_normal((len(LABELS), 2))


def test_separable_features_score_one_and_noise_scores_chance() -> None:
    good = barlow_probe.few_shot((clusters(0.01), LABELS), (clusters(0.01), LABELS))
    assert (good.linear, good.knn) == (1.0, 1.0)
    noise = np.random.default_rng(1).standard_normal((len(LABELS), 2))
    bad = barlow_probe.few_shot(
        (noise, LABELS), (np.random.default_rng(2).standard_normal(noise.shape), LABELS)
    )
    assert bad.linear < 0.45 and bad.knn < 0.45


def test_label_draws_are_fixed_and_five_of_each_class() -> None:
    first = barlow_probe.draw_labels(LABELS, 3)
    np.random.default_rng(0).random(5)
    assert np.array_equal(first, barlow_probe.draw_labels(LABELS, 3))
    assert not np.array_equal(first, barlow_probe.draw_labels(LABELS, 4))
    assert np.bincount(LABELS[first]).tolist() == [5, 5, 5, 5]


def test_probe_leaves_a_training_backbone_training_and_unchanged() -> None:
    """A probe in training mode would move BatchNorm's averages, and so change what it measures."""
    source = barlow_data.load_data("digits", Path())
    backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    score = barlow_probe.probe_backbone(backbone, source, torch.device("cpu"))
    assert backbone.training
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())
    assert score == barlow_probe.probe_backbone(backbone, source, torch.device("cpu"))
    assert 0.1 < score.linear < 1
