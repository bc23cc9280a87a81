"""Reinforcement learning with a replay buffer: steps without a data set.

The data are the numbers of the draws. Random numbers of the loop are the same on every rank, so all
play the same game; each shard draws its own part of the replayed batch. The buffer, and the game
that goes on from step to step, are part of the state.

    elastic-train examples/replay_buffer.py
"""

import torch
from torch import nn

import elastic

SIZE, PLACES = 512, 9  # a walker on a line of nine places; the right end is the goal

run = elastic.start(seed=0, global_batch=64, shards=8)
model = nn.Sequential(nn.Linear(PLACES, 64), nn.ReLU(), nn.Linear(64, 2)).to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# Each row: place, action, reward, next place.
game = elastic.Values(replay=torch.zeros(SIZE, 4, dtype=torch.int64), moves=0, place=4, goals=0)
data = run.data(range(64), steps=100)
state = elastic.State(model=model, optimizer=optimizer, game=game)


def scores_of(places):
    return model(nn.functional.one_hot(places, PLACES).float().to(run.device))


def move():
    with torch.no_grad():
        best = int(scores_of(torch.tensor([game.place])).argmax())
    action = best if torch.rand(()) > 0.2 else int(torch.randint(2, ()))
    following = min(max(game.place + 2 * action - 1, 0), PLACES - 1)
    reward = int(following == PLACES - 1)
    game.replay[game.moves % SIZE] = torch.tensor([game.place, action, reward, following])
    game.moves, game.goals = game.moves + 1, game.goals + reward
    game.place = 4 if reward else following


def error(batch):
    drawn = game.replay[torch.randint(min(game.moves, SIZE), (len(batch.indices),))].to(run.device)
    places, actions, rewards, following = drawn.T
    with torch.no_grad():
        targets = rewards + 0.9 * scores_of(following).amax(1) * (1 - rewards)
    return (scores_of(places).gather(1, actions[:, None])[:, 0] - targets).square().mean()


for step in run.steps(data, state):
    for _ in range(4):
        move()
    loss = step.mean_loss(error)
    optimizer.step()
    step.log(loss=loss, goals=game.goals)
