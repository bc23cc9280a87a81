"""Two networks and two optimizers: a generator of digits and its critic.

Each update follows a gradient of its own. `mean_loss` gives one to every parameter that its
function used; `zero_grad` drops what the loss of the generator left in the critic.

    elastic-train examples/gan.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import elastic

NOISE = 16

train = TensorDataset(torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32))

run = elastic.start(seed=0, global_batch=128, shards=8)
generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()).to(run.device)
critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(run.device)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
data = run.data(train, epochs=3)
state = elastic.State(
    generator=generator,
    critic=critic,
    generator_optimizer=generator_optimizer,
    critic_optimizer=critic_optimizer,
)


def generated(batch):
    """Random numbers in the function of a shard are that shard's own, on whichever worker."""
    return generator(torch.randn(len(batch.indices), NOISE, device=run.device))


def critic_loss(batch):
    return (softplus(-critic(batch.data[0])) + softplus(critic(generated(batch).detach()))).mean()


def generator_loss(batch):
    return softplus(-critic(generated(batch))).mean()


for step in run.steps(data, state):
    critic_optimizer.zero_grad()
    of_critic = step.mean_loss(critic_loss)
    critic_optimizer.step()
    of_generator = step.mean_loss(generator_loss)
    generator_optimizer.step()
    step.log(critic=of_critic, generator=of_generator)
