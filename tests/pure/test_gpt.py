"""The small GPT sees no later character, and its windows cover the text."""

import pytest
import torch
from gpt import GPT, Settings, Text, Windows

SMALL = Settings.parse(["--width", "16", "--heads", "2", "--context", "12", "--layers", "2"])


def test_a_score_depends_on_no_later_character():
    """One character is exchanged: what stands before it has the same scores as before."""
    torch.manual_seed(0)
    model = GPT(SMALL, 7).eval()
    tokens = torch.randint(7, (1, 12))
    other = tokens.clone()
    other[0, 8] = (other[0, 8] + 1) % 7

    before, after = model(tokens), model(other)

    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_a_window_lies_in_its_own_stretch_of_the_text():
    text = torch.arange(100)
    windows = Windows(text, 10)

    assert len(windows) == 8
    for i in range(len(windows)):
        window = windows[i]
        assert 10 * i <= int(window[0]) < 10 * (i + 1)
        assert torch.equal(window, torch.arange(int(window[0]), int(window[0]) + 11))


def test_the_held_out_text_is_read_once(tmp_path):
    file = tmp_path / "text"
    file.write_text("abcd" * 250)
    text = Text.read(str(file))

    (pieces,) = text.windows(12).tensors

    assert text.alphabet == "abcd"
    assert (len(text.train), len(text.held_out)) == (900, 100)
    assert torch.equal(pieces[:, :-1].flatten(), text.held_out[: 12 * len(pieces)])
    assert torch.equal(pieces[:-1, -1], pieces[1:, 0])
    assert text.letter_frequency_bits == pytest.approx(2.0)
