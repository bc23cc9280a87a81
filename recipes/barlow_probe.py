"""A probe's scores depend on the backbone's weights and the labelled images alone.

Five labelled samples of each class are drawn ten times; a linear classifier and a nearest-neighbour
vote learn from them and are tested on samples that no draw contains. It measures what a backbone
knows with few labels, which on small images separates a trained network from an untrained one; it
is no substitute for the linear evaluation of the papers.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from barlow_data import Source
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Dataset

LABELS_PER_CLASS = 5
LABEL_DRAWS = 10
NEIGHBOURS = 5

Features = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeScore:
    """Accuracies in [0, 1], means over the label draws."""

    linear: float
    knn: float


def probe_backbone(backbone: nn.Module, source: Source, device: torch.device) -> ProbeScore:
    """Scores of a frozen backbone; it comes back in the mode (training or not) that it had."""
    was_training = backbone.training
    backbone.eval()
    pool, test = (_features(backbone, part, device) for part in (source.pool, source.test))
    backbone.train(was_training)
    return few_shot(pool, test)


def few_shot(pool: tuple[Features, Labels], test: tuple[Features, Labels]) -> ProbeScore:
    """Scores on `test` of classifiers that see 5 labels per class of `pool`.

    pool, test: features [n, d] and labels [n].
    """
    # The scale of a feature needs no labels, so it is taken from the whole pool.
    scaler = StandardScaler().fit(pool[0])
    seen, unseen = scaler.transform(pool[0]), scaler.transform(test[0])
    linear: list[float] = []
    knn: list[float] = []
    for draw in range(LABEL_DRAWS):
        chosen = draw_labels(pool[1], draw)
        classifiers = LogisticRegression(max_iter=1000), KNeighborsClassifier(min(NEIGHBOURS, len(chosen)))
        for classifier, scores in zip(classifiers, (linear, knn), strict=True):
            scores.append(classifier.fit(seen[chosen], pool[1][chosen]).score(unseen, test[1]))
    return ProbeScore(linear=float(np.mean(linear)), knn=float(np.mean(knn)))


def draw_labels(labels: Labels, draw: int) -> Labels:
    """Indices of five samples per class (all of a smaller class), fixed by labels and `draw`."""
    random = np.random.default_rng(draw)
    members = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    return np.concatenate([indices[:LABELS_PER_CLASS] for indices in members])


@torch.inference_mode()
def _features(backbone: nn.Module, part: Dataset[object], device: torch.device) -> tuple[Features, Labels]:
    features, labels = [], []
    for images, some in DataLoader(part, batch_size=250):
        features.append(backbone(images.to(device)).double().cpu().numpy())
        labels.append(some.numpy())
    return np.concatenate(features), np.concatenate(labels)


def save_backbone(backbone: nn.Module, path: Path) -> None:
    """Write the weights for `torch.load(path, weights_only=True)`; `path` is replaced whole.

    A ResNet's file fits torchvision's model of that name with `fc` left out (the first convolution
    differs when the network was built for small images).
    """
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.state_dict().items()}
    temporary = path.with_name(path.name + ".partial")
    torch.save(weights, temporary)
    temporary.replace(path)
