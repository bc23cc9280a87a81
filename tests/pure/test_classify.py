"""The classifier's images are varied as it says, and its networks give scores."""

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
