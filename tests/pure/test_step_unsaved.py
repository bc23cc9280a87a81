"""An object of the recipe's own may hold what is trained, and all that trains it."""

import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.optim.lr_scheduler import StepLR

from elastic.train.state.state import State


def net_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


def train(state, net, update, scaler=None):
    for step in steps(ALONE, state):
        step.mean_loss(loss_of(net), scaler)
        update()


class Trainer:
    """An object of the recipe's own that holds everything, and saves copies."""

    def __init__(self):
        self.net = net_of()
        self.parts = {"optimizer": torch.optim.AdamW(self.net.parameters(), lr=0.01)}
        self.parts["scheduler"] = StepLR(self.parts["optimizer"], 2)
        self.scaler = torch.amp.GradScaler("cpu")

    def state_dict(self):
        return {
            "net": {name: value.clone() for name, value in self.net.state_dict().items()},
            **{name: part.state_dict() for name, part in self.parts.items()},
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state):
        raise NotImplementedError

    def update(self):
        self.scaler.step(self.parts["optimizer"])
        self.scaler.update()
        self.parts["scheduler"].step()


def test_what_an_object_of_the_recipes_own_holds_is_saved_by_it(ranks):
    """Its BatchNorm's buffers are put back for each shard as well."""
    alone = ranks.run(1, train_a_trainer)
    assert ranks.run(3, train_a_trainer) == alone * 3


def train_a_trainer(member):
    trainer = Trainer()
    for step in steps(member, State(trainer=trainer)):
        step.mean_loss(loss_of(trainer.net), trainer.scaler)
        trainer.update()
    return [float(value.double().sum()).hex() for value in trainer.net.state_dict().values()]
