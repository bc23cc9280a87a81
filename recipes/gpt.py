"""A small GPT that learns to write a text, character by character.

The text is any file; without one it is this project's own documents. A sample is a window of the
text whose beginning is drawn by torch's generator, which the library keys by the sample. Weights of
the first and the last layer are tied, gradients are clipped, dropout is on.

Architecture: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2), at
a thousandth of its size.

    elastic-train recipes/gpt.py                            # two minutes on two cores
    elastic-train recipes/gpt.py --nproc-per-node 2 -- --shard
    elastic-train recipes/gpt.py -- --text shakespeare.txt --layers 6 --width 384 --context 256 \
        --global-batch 64 --steps 5000 --bf16 --compile
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from recipe_settings import not_a_rate, option, parse, too_small
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import elastic

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    text: str = option("", "file to learn, UTF-8; empty: README.md and docs/ of this project")
    steps: int = option(500, "optimizer updates")
    global_batch: int = option(32, "windows of text per step, over all workers")
    shards: int = option(8, "fixed slices of each global batch; at least the largest number of workers")
    seed: int = option(0, "of initial weights, windows and dropout")
    context: int = option(64, "characters that the model sees")
    layers: int = option(2, "blocks of attention and MLP")
    heads: int = option(4, "of attention in each block")
    width: int = option(128, "features of a character")
    dropout: float = option(0.05, "share of features that is dropped")
    lr: float = option(4e-3, "peak learning rate")
    weight_decay: float = option(0.1, "of matrices; biases and norms have none")
    warmup: float = option(0.1, "fraction of the run in which the learning rate rises")
    clip: float = option(1.0, "largest norm of the gradient")
    validate_every: int = option(100, "steps between two validations")
    sample: int = option(300, "characters to write at the end")
    bf16: bool = option(False, "autocast the forward pass to bfloat16")
    compile: bool = option(False, "torch.compile the model")
    shard: bool = option(False, "cut model and optimizer state over the workers (FSDP2)")

    @staticmethod
    def parse(arguments: Sequence[str] | None = None) -> "Settings":
        """From the command line; a value that makes no sense ends in exit code 2 and a message."""
        return parse(Settings, "gpt.py", "A small GPT on any text.", arguments)

    def problem(self) -> str | None:
        """What is wrong with the values together, or None."""
        if self.text and not Path(self.text).is_file():
            return f"--text {self.text} is not a file; every node needs it at this path"
        if self.heads < 1 or self.width % self.heads:
            return f"--heads must divide --width, found {self.heads} and {self.width}"
        if not (0 <= self.warmup < 1 and 0 <= self.dropout < 1):
            return "--warmup and --dropout are fractions in [0, 1)"
        least = {"steps": 1, "global_batch": 1, "shards": 1, "context": 2, "layers": 1, "validate_every": 1}
        return too_small(self, **least, seed=0, sample=0) or not_a_rate(self, "lr", "weight_decay", "clip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """train, held_out: int64 [n], characters by their place in `alphabet`.

    The last tenth of the text is held out.
    """

    alphabet: str
    train: Tensor
    held_out: Tensor

    @staticmethod
    def read(file: str) -> "Text":
        own = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
        text = "\n".join(path.read_text() for path in ([Path(file)] if file else own))
        alphabet = "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(alphabet)}
        numbers = torch.tensor([number[character] for character in text])
        split = len(numbers) - len(numbers) // 10
        return Text(alphabet=alphabet, train=numbers[:split], held_out=numbers[split:])

    def windows(self, context: int) -> TensorDataset:
        """The held-out text, int64 [pieces, context + 1]; each begins where the last one ends."""
        return TensorDataset(self.held_out.unfold(0, context + 1, context).contiguous())

    @property
    def letter_frequency_bits(self) -> float:
        """Bits per character of a guess that knows nothing but how often each character occurs."""
        counts = Counter(self.train.tolist())
        return -sum(n / len(self.train) * math.log2(n / len(self.train)) for n in counts.values())


class Windows(Dataset[Tensor]):
    """Sample i begins somewhere in the i-th stretch of the text: int64 [context + 1]."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context - 1

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context + int(torch.randint(self.context, ()))
        return self.text[start : start + self.context + 1]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))
        self.mlp = nn.Sequential(*mlp)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] → the same."""
        n, length, width = x.shape
        parts = self.queries_keys_values(self.norm_attention(x)).view(n, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.mix(seen.transpose(1, 2).reshape(n, length, width)), dropout)
        mixed: Tensor = x + self.mlp(self.norm_mlp(x))
        return mixed


class GPT(nn.Module):
    def __init__(self, settings: Settings, characters: int) -> None:
        super().__init__()
        width = settings.width
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(settings.context, width)
        blocks = (Block(width, settings.heads, settings.dropout) for _ in range(settings.layers))
        self.blocks = nn.Sequential(nn.Dropout(settings.dropout), *blocks, nn.LayerNorm(width))
        self.head = nn.Linear(width, characters, bias=False)
        self.apply(_small_weights)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [n, length] → scores of the next character [n, length, characters]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.head(self.blocks(self.token(tokens) + self.place(places)))
        return scores


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def lr_share(fraction: float, warmup: float) -> float:
    """Share of the peak learning rate after `fraction` of the run: linear, then cosine to 0.1."""
    if fraction < warmup:
        return fraction / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (fraction - warmup) / (1 - warmup))


@torch.no_grad()
def write(model: GPT, text: Text, settings: Settings, device: torch.device) -> str:
    """`settings.sample` characters, each drawn from the model's scores for it."""
    model.eval()
    written = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for _ in range(settings.sample):
        scores = model(written[:, -settings.context :])[0, -1]
        following = torch.multinomial(scores.softmax(0), 1)
        written = torch.cat([written, following.view(1, 1)], 1)
    return "".join(text.alphabet[i] for i in written[0, 1:].tolist())


def main() -> None:
    settings = Settings.parse()
    text = Text.read(settings.text)
    run = elastic.start(seed=settings.seed, global_batch=settings.global_batch, shards=settings.shards)
    model = GPT(settings, len(text.alphabet)).to(run.device)
    if settings.shard:
        for block in model.blocks[1:-1]:
            run.fully_shard(block)
        run.fully_shard(model)
    scores_of: Callable[[Tensor], Tensor] = torch.compile(model) if settings.compile else model
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99))
    data = run.data(Windows(text.train, settings.context), steps=settings.steps)
    state = elastic.State(model=model, optimizer=optimizer)
    pieces = text.windows(settings.context)

    def losses_of(tokens: Tensor, reduction: str) -> Tensor:
        autocast = torch.autocast(run.device.type, torch.bfloat16) if settings.bf16 else nullcontext()
        with autocast:
            scores = scores_of(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction=reduction)

    def held_out_bits() -> float:
        """Bits per character of the held-out text, the same bits at every world size."""
        model.eval()
        total = run.evaluate(pieces, lambda batch: losses_of(batch.data[0], "sum").double())
        model.train()
        return float(total) / (len(pieces) * settings.context) / math.log(2)

    for step in run.steps(data, state):
        lr = settings.lr * lr_share(step.fraction, settings.warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = step.mean_loss(lambda batch: losses_of(batch.data, "mean"))
        norm = elastic.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        step.log(loss=loss, lr=lr, norm=norm)
        if step.number % settings.validate_every == 0:
            bits = held_out_bits()
            step.log(bits=bits)
            run.print(json.dumps({"step": step.number, "loss": loss, "bits": bits}))

    bits, known = held_out_bits(), text.letter_frequency_bits
    written = write(model, text, settings, run.device)  # a sharded model writes on all workers together
    run.print(written)
    if run.is_first and not settings.shard:  # `elastic-train export` gathers what is sharded
        torch.save(model.state_dict(), run.path("gpt.pth"))
    run.print(f"{bits:.3f} bits per held-out character | {known:.3f} by the frequency of characters alone")


if __name__ == "__main__":
    main()
