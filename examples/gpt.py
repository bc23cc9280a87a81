"""A small transformer that learns a text, character by character.

The text is the source of torch.nn.functional, which is at hand everywhere: read your own there.
recipes/gpt.py is the same at length, with bfloat16, validation and options.

    elastic-train examples/gpt.py
"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import elastic

CONTEXT, WIDTH = 32, 64
text = Path(nn.functional.__file__).read_text()[:50_000]
alphabet = sorted(set(text))
tokens = torch.tensor([alphabet.index(character) for character in text])


class Windows(Dataset):
    """Sample i begins at random in the i-th stretch of the text."""

    def __len__(self):
        return (len(tokens) - 1) // CONTEXT - 1

    def __getitem__(self, index):
        start = index * CONTEXT + int(torch.randint(CONTEXT, ()))
        return tokens[start : start + CONTEXT + 1]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(len(alphabet), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(alphabet))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x):
        places = torch.arange(CONTEXT, device=x.device)
        return self.head(self.blocks(self.token(x) + self.place(places), mask=self.mask, is_causal=True))


run = elastic.start(seed=0, global_batch=32, shards=4)
model = GPT().to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = run.data(Windows(), steps=40)
state = elastic.State(model=model, optimizer=optimizer)

for step in run.steps(data, state):
    loss = step.mean_loss(
        lambda batch: nn.functional.cross_entropy(
            model(batch.data[:, :-1]).flatten(0, 1), batch.data[:, 1:].flatten()
        )
    )
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    step.log(loss=loss)
