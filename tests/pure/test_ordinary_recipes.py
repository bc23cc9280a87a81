"""Recipes of many kinds, as people write them, are exact: the same bits after every step at every
world size, audited or not, and where the state of a step is loaded into objects that were built
again.

Each is a generator: it yields the State first, then every step when its body is done. `first` is
the step to begin with. What starts, kills and resumes real processes is in tests/process.
"""

import copy
import random
from collections import deque
from functools import cache

import numpy as np
import pytest
import torch
from steps import BATCH, CLASSES, FEATURES, SAMPLES, samples, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.transforms import v2

import elastic
from elastic.data.order import Tail
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State

STEPS, RESUMED_AT = 6, 4
AUDITED = 2  # workers of the run in which each computation is audited
WIDTH = 8


def train_steps(member, state, first, **settings):
    audits = member.world_size == AUDITED
    return steps(member, state, epochs=3, first=first, audits=audits, **settings)


def perceptron(*extra):
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *extra, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def images():
    """float32 [SAMPLES, 3, 8, 8], int64 [SAMPLES]."""
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(SAMPLES, 3, 8, 8, generator=draw), samples().tensors[1])


def tokens():
    """int64 [SAMPLES, 9] below 11."""
    return TensorDataset(torch.randint(11, (SAMPLES, 9), generator=torch.Generator().manual_seed(3)))


class Augmented(Dataset):
    """Images through torchvision's transforms, whose draws come from the global generators."""

    def __init__(self):
        self.base = images()
        self.transform = v2.Compose(
            [v2.RandomCrop(8, padding=1), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2, 0.2)]
        )

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        image, label = self.base[index]
        return self.transform(image.sigmoid()), label


def classifier(member, first):
    """Convolutions with BatchNorm and dropout, AdamW with groups, cosine schedule, clipping."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )
    decayed, plain = [[p for p in net.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False)]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)
    schedule = schedules.CosineAnnealingLR(optimizer, STEPS)
    state = State(net=net, optimizer=optimizer, schedule=schedule)
    yield state
    for step in train_steps(member, state, first, dataset=Augmented()):
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1], label_smoothing=0.1))
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield step


def adversarial(member, first):
    """Two critic updates for one of the generator, spectral norm, gradient penalty, BatchNorm."""
    generator = nn.Sequential(
        nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, FEATURES)
    )
    critic = nn.Sequential(spectral_norm(nn.Linear(FEATURES, WIDTH)), nn.LeakyReLU(), nn.Linear(WIDTH, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    state = State(generator=generator, critic=critic, of_generator=of_generator, of_critic=of_critic)

    def critic_loss(batch):
        real = batch.data[0]
        fake = generator(torch.randn(len(real), 4))
        between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return (critic(fake) - critic(real)).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()

    yield state
    for step in train_steps(member, state, first):
        critic.requires_grad_(True)
        generator.requires_grad_(False)
        for _ in range(2):
            step.mean_loss(critic_loss)
            of_critic.step()
        critic.requires_grad_(False)
        generator.requires_grad_(True)
        step.mean_loss(lambda batch: -critic(generator(torch.randn(len(batch.indices), 4))).mean())
        of_generator.step()
        yield step


class LanguageModel(nn.Module):
    """Tied embeddings, a frozen part, layers dropped by `random`, an expert chosen by the data."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.place = nn.Parameter(torch.randn(8, WIDTH), requires_grad=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        hidden = self.table(x) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        for layer in self.layers:
            if random.random() < 0.7:
                hidden = layer(hidden, src_mask=mask, is_causal=True)
        hidden = hidden + self.experts[int(x.sum()) % 3](hidden)
        return hidden @ self.table.weight.T


def language_model(member, first):
    net = LanguageModel()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    state = State(net=net, optimizer=optimizer)
    yield state
    for step in train_steps(member, state, first, dataset=tokens()):
        step.mean_loss(
            lambda batch: F.cross_entropy(
                net(batch.data[0][:, :-1]).flatten(0, 1), batch.data[0][:, 1:].flatten()
            )
        )
        optimizer.step()
        yield step


def narrow_and_wide(member, first):
    """Parameters of bfloat16, float16 and float64, and one without dimensions."""
    low, half, wide = (perceptron().to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64))
    low.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    optimizers = (
        torch.optim.NAdam(low.parameters(), lr=1e-2),
        torch.optim.SGD(half.parameters(), lr=1e-2, momentum=0.9),
        torch.optim.Adam(wide.parameters(), lr=1e-2, amsgrad=True),
    )
    state = State(low=low, half=half, wide=wide, a=optimizers[0], b=optimizers[1], c=optimizers[2])

    def loss(batch):
        x, y = batch.data
        found = low(x.bfloat16()) * low.scale, half(x.half()), wide(x.double())
        return sum(F.cross_entropy(one.float(), y) for one in found)

    yield state
    for step in train_steps(member, state, first):
        step.mean_loss(loss)
        for optimizer in optimizers:
            optimizer.step()
        yield step


def complex_numbers(member, first):
    """A complex parameter and buffer; convolutions in channels_last."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
    net = net.to(memory_format=torch.channels_last)
    net.wave = nn.Parameter(torch.randn(CLASSES, dtype=torch.complex64))
    net.register_buffer("carrier", torch.randn(CLASSES, dtype=torch.complex64))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    state = State(net=net, optimizer=optimizer)

    def loss(batch):
        found = net(batch.data[0].to(memory_format=torch.channels_last)) * net.wave * net.carrier
        return F.cross_entropy(found.abs(), batch.data[1])

    yield state
    for step in train_steps(member, state, first, dataset=images()):
        step.mean_loss(loss)
        optimizer.step()
        yield step


def averaged(member, first):
    """EMA with buffers, SWA with its schedule, autocast, GradScaler with unscale and clipping."""
    net = perceptron(nn.BatchNorm1d(WIDTH))
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    warm = schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    flat = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    state = State(net=net, ema=ema, swa=swa, optimizer=optimizer, warm=warm, flat=flat, scaler=scaler)

    def loss(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(net(batch.data[0]), batch.data[1])

    yield state
    for step in train_steps(member, state, first):
        step.mean_loss(loss, scaler=scaler)
        scaler.unscale_(optimizer)
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        ema.update_parameters(net)
        if step.number > 3:
            swa.update_parameters(net)
            flat.step()
        else:
            warm.step()
        yield step


def line_search(member, first):
    """LBFGS calls the closure, and with it `mean_loss`, several times in a step."""
    net = perceptron()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    state = State(net=net, optimizer=optimizer)
    yield state
    for step in train_steps(member, state, first):

        def closure(step=step):
            optimizer.zero_grad()
            return step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))

        optimizer.step(closure)
        yield step


def regularised(member, first):
    """The recipe adds a gradient of its own to that of the batch."""
    net = perceptron()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = State(net=net, optimizer=optimizer)
    yield state
    for step in train_steps(member, state, first):
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        (1e-2 * sum(p.abs().sum() for p in net.parameters())).backward()
        optimizer.step()
        yield step


def sharpness_aware(member, first):
    """SAM: a gradient at the weights, a climb, a second gradient there, and the update below."""
    net = perceptron()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = State(net=net, optimizer=optimizer)

    def loss(batch):
        return F.cross_entropy(net(batch.data[0]), batch.data[1])

    yield state
    for step in train_steps(member, state, first):
        step.mean_loss(loss)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
            climbs = [0.05 * p.grad / norm for p in net.parameters()]
            for p, climb in zip(net.parameters(), climbs, strict=True):
                p.add_(climb)
        optimizer.zero_grad()
        step.mean_loss(loss)
        with torch.no_grad():
            for p, climb in zip(net.parameters(), climbs, strict=True):
                p.sub_(climb)
        optimizer.step()
        yield step


class Sentences(Dataset):
    """Lists of 2 to 5 numbers."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"words": torch.randn(2 + index % 4, FEATURES), "label": index % CLASSES}


def padded_and_mixed(samples):
    """A dict, padded to the longest, mixed up in pairs by NumPy's generator."""
    words = nn.utils.rnn.pad_sequence([one["words"] for one in samples], batch_first=True)
    share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002 - keyed, as a recipe has it
    return {
        "words": share * words + (1 - share) * words.flip(0),
        "label": torch.tensor([one["label"] for one in samples]),
        "share": share,
    }


def variable_lengths(member, first):
    net = nn.GRU(FEATURES, WIDTH, batch_first=True)
    head = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.RMSprop([*net.parameters(), *head.parameters()], lr=1e-2)
    state = State(net=net, head=head, optimizer=optimizer)

    def loss(batch):
        found, y, share = head(net(batch.data["words"])[0][:, -1]), batch.data["label"], batch.data["share"]
        return share * F.cross_entropy(found, y) + (1 - share) * F.cross_entropy(found, y.flip(0))

    yield state
    for step in train_steps(member, state, first, dataset=Sentences(), collate=padded_and_mixed):
        step.mean_loss(loss)
        optimizer.step()
        yield step


class Queue(nn.Module):
    """The latest keys, which the loop puts in."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(2 * BATCH, WIDTH), dim=1))

    def push(self, keys):
        self.keys = torch.cat([keys, self.keys])[: len(self.keys)]


def memory_bank(member, first):
    """MoCo: the keys of a step are put together by `step.sum`, and queued in the loop."""
    net, slow, queue = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH), Queue()
    slow.load_state_dict(net.state_dict())
    slow.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = State(net=net, slow=slow, queue=queue, optimizer=optimizer)

    def loss(batch):
        x = batch.data[0]
        query, key = F.normalize(net(x), dim=1), F.normalize(slow(x), dim=1)
        alike = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.keys.T], dim=1)
        return F.cross_entropy(alike / 0.2, torch.zeros(len(x), dtype=torch.int64))

    def keys(batch):
        rows = torch.zeros(SAMPLES, WIDTH)
        rows[batch.indices] = F.normalize(slow(batch.data[0]), dim=1)
        return rows

    yield state
    for step in train_steps(member, state, first):
        found = step.sum(keys).detach()
        step.mean_loss(loss)
        optimizer.step()
        queue.push(found[found.abs().sum(1) > 0])
        with torch.no_grad():
            for old, new in zip(slow.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.1)
        yield step


def boxes(samples):
    return [torch.ones(2) * index for _, index in samples for _ in range(int(index))], torch.stack(
        [x for x, _ in samples]
    )


def detector(member, first):
    """Samples have from none to two boxes: the loss is an exact mean over all boxes of a batch."""
    net = nn.Linear(FEATURES, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = State(net=net, optimizer=optimizer)

    def terms(batch):
        there, x = batch.data
        centre = net(x).mean(0)
        errors = [F.smooth_l1_loss(centre, box, reduction="sum") for box in there]
        return torch.stack([sum(errors, centre.sum() * 0), torch.tensor(float(len(errors)))])

    yield state
    for step in train_steps(member, state, first, collate=boxes):
        total = step.sum(terms)
        step.backward(total[0] / total[1].clamp(min=1))
        optimizer.step()
        yield step


class Replay:
    """Transitions, of which the latest are kept; an object with a state_dict of its own."""

    def __init__(self):
        self.kept, self.best = deque(maxlen=64), float("-inf")

    def state_dict(self):
        return {"kept": list(self.kept), "best": self.best}

    def load_state_dict(self, saved):
        self.kept, self.best = deque(saved["kept"], maxlen=64), saved["best"]


def replayed(member, first):
    """Q-learning: every rank plays the same game, and trains shards of what it remembers."""
    net, replay = nn.Linear(4, 2), Replay()
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    state = State(net=net, target=target, optimizer=optimizer, replay=replay)

    def loss(batch):
        picked = [replay.kept[int(i) % len(replay.kept)] for i in batch.indices]
        seen, action, reward, then = (torch.tensor(column) for column in zip(*picked, strict=True))
        aim = reward + 0.9 * target(then).max(1).values
        return F.mse_loss(net(seen).gather(1, action[:, None])[:, 0], aim)

    yield state
    for step in train_steps(member, state, first):
        place = torch.zeros(4)
        for _ in range(4):
            action = int(net(place).argmax()) if random.random() < 0.5 else random.randrange(2)
            then = torch.roll(place, 1) + torch.randn(4)
            replay.kept.append([place.tolist(), action, float(then.sum()), then.tolist()])
            place = then
        step.mean_loss(loss)
        optimizer.step()
        replay.best = max(replay.best, float(place.sum()))
        if step.number % 2 == 0:
            target.load_state_dict(net.state_dict())
        yield step


def few_samples(member, first):
    """A list of 19 samples, one of them in each shard; the last batch of an epoch is filled up."""
    net, dataset = perceptron(), [samples()[index] for index in range(19)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    state = State(net=net, optimizer=optimizer)
    yield state
    for step in steps(member, state, epochs=2, first=first, dataset=dataset, batch=8, tail=Tail.PAD):
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        optimizer.step()
        yield step


def judged_by_a_draw(member, first):
    """Code of the recipe's own validates on the first batch of a DataLoader that shuffles, and the
    rate follows it.
    """
    net = perceptron()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    state = State(net=net, optimizer=optimizer)
    yield state
    for step in train_steps(member, state, first):
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        with torch.no_grad():
            x, y = next(iter(DataLoader(samples(), batch_size=8, shuffle=True)))
            optimizer.param_groups[0]["lr"] = 0.1 * float(F.cross_entropy(net(x), y))
        optimizer.step()
        yield step


def patient(member, first):
    """Plain numbers of the loop, in Values."""
    net, kept = perceptron(), elastic.Values(best=float("inf"), patience=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    state = State(net=net, optimizer=optimizer, kept=kept)
    yield state
    for step in train_steps(member, state, first):
        loss = step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        kept.patience = 0 if loss < kept.best else kept.patience + 1
        kept.best = min(kept.best, loss)
        if kept.patience:
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        yield step


def coupled(member, first):
    """Two sums with draws of their own, a sum for the metrics, checkpointing, a penalty; the body
    moves a centre between a sum and the loss, and draws.
    """
    net = perceptron(nn.BatchNorm1d(WIDTH))
    net.register_buffer("center", torch.zeros(FEATURES))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    state = State(net=net, optimizer=optimizer, drawn=(drawn := elastic.Values(last=0.0)))

    def outputs(batch):
        return checkpoint(net, batch.data[0] - net.center, use_reentrant=False).double()

    yield state
    for step in train_steps(member, state, first):
        mean = step.sum(lambda batch: (batch.data[0] - net.center).double().sum(0)).float() / BATCH
        net.center.add_(mean, alpha=0.1)
        totals = [
            step.sum(
                lambda batch, scale=scale: (
                    scale * outputs(batch).square().sum(0) + torch.rand(CLASSES) + batch.uniform(1).sum()
                )
            )
            for scale in (1.0, 2.0)
        ]
        step.sum(lambda batch: (outputs(batch).argmax(1) == batch.data[1]).sum())
        drawn.last = float(torch.rand(())) + random.random()
        step.backward(sum((total / BATCH).square().mean() for total in totals) + net[0].weight.square().sum())
        optimizer.step()
        yield step


def compiled(member, first):
    """Graphs of torch.compile, over batches of two lengths; denormal numbers become zero."""
    torch.set_flush_denormal(True)
    net = nn.Sequential(nn.Embedding(11, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 11))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = State(net=net, optimizer=optimizer)
    fast = torch.compile(net, backend="aot_eager")  # the default one needs a C++ compiler
    yield state
    for step in train_steps(member, state, first, dataset=tokens()):
        end = 8 - step.number % 2
        step.mean_loss(
            lambda batch, end=end: F.cross_entropy(
                fast(batch.data[0][:, :end]).flatten(0, 1), batch.data[0][:, 1 : end + 1].flatten()
            )
        )
        optimizer.step()
        yield step
    torch.set_flush_denormal(False)


RECIPES = {
    each.__name__: each
    for each in (
        classifier, adversarial, language_model, narrow_and_wide, complex_numbers, averaged, line_search,
        regularised, sharpness_aware, variable_lengths, memory_bank, detector, replayed, few_samples,
        judged_by_a_draw, patient, coupled, compiled,
    )
}  # fmt: skip


def built(member, name, first):
    torch.manual_seed(0)
    coming = RECIPES[name](member, first)
    return next(coming), coming


def train(member, name):
    """The checksums after each step; that after the last step if it was resumed in between; and
    what the chain value is made of in the steps that were then done again, both times.
    """
    state, coming = built(member, name, 1)
    seen, kept, numbers = [], None, []
    for step in coming:
        numbers.append(numbers_of(step))
        seen.append(checksum_of(state.flatten()).entries)
        if step.number == RESUMED_AT - 1:
            kept = copy.deepcopy(state.flatten())
    again, coming = built(member, name, RESUMED_AT)
    again.load(kept)
    done_again = [numbers_of(step) for step in coming]
    assert len(done_again) == STEPS + 1 - RESUMED_AT
    return [seen, checksum_of(again.flatten()).entries, numbers[RESUMED_AT - 1 :], done_again]


def numbers_of(step):
    outcome = step.outcome or step.end_by_hand()
    return [number.hex() for number in outcome.losses]


@pytest.fixture(scope="module")
def trained(ranks):
    return cache(lambda world_size, name: ranks.run(world_size, train, name))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_this_kind_is_exact(trained, world_size, name):
    calm, resumed, first_time, done_again = trained(1, name)[0]

    assert len(calm) == STEPS
    assert calm[0] != calm[-1]
    assert resumed == calm[-1]
    assert done_again == first_time
    # The second world is audited, which must change nothing either.
    assert trained(world_size, name) == [[calm, resumed, first_time, done_again]] * world_size
