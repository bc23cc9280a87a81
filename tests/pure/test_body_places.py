"""What the body of each step leaves in an object is not read by the next step, or the run ends."""

import re
import textwrap
from pathlib import Path

import pytest

import elastic
from elastic.errors import UsageError
from elastic.train.body_places import BodyPlaces
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.left_behind import Leftovers
from elastic.train.loop_memory import LoopMemory
from elastic.train.module_settings import ModuleSettings
from tests.pure.test_loop_memory import Unread

# The library's own frames are no part of a recipe, and neither is this one.
STEPS = compile(
    "import sys\n"
    "def steps_of(memory, leftovers, count, Step, kept, said):\n"
    "    for number in range(1, count + 1):\n"
    "        leftovers.begin_step(number)\n"
    "        memory.begin(number, begins_epoch=number % 6 == 1)\n"
    "        yield Step(number)\n"
    "        said.append(leftovers.end_step())\n"
    "        if number in kept:\n"
    "            memory.before_saving(number, sys._getframe())",
    str(Path(elastic.__file__).parent / "steps.py"),
    "exec",
)
HEADER = """
import collections, types
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3).requires_grad_(False)
        self.register_buffer("center", torch.zeros(3))
        self.hidden = self.out = self.mean = None
    def forward(self, x):
        hidden = torch.relu(self.body(x))
        self.keep(hidden)
        return hidden
    def keep(self, hidden):
        self.hidden = hidden
    def move(self):
        with torch.no_grad():
            self.body.weight.add_(0.01)

class InList(Net):
    def keep(self, hidden):
        self.out = [hidden, {"scaled": 2 * hidden}]

class InNamespace(Net):
    def keep(self, hidden):
        self.out = types.SimpleNamespace(hidden=hidden)

class Mean(Net):
    def keep(self, hidden):
        self.mean = hidden if self.mean is None else 0.9 * self.mean + 0.1 * hidden

class Probe:
    def __init__(self, net):
        self.net, self.last, self.found = net, None, {}
    def look(self, x):
        hidden = torch.relu(self.net.body(x))
        self.last, self.found["last"] = hidden, hidden

class Table:
    newest = None
    def __init__(self):
        self.epoch = self.values = None
    def refresh(self, epoch):
        self.epoch = epoch
        self.values = torch.full((3,), float(epoch + 1))

class Grown(nn.Module):
    values = None
    def forward(self, count):
        if self.values is None or len(self.values) < count:
            self.values = torch.arange(count).float().sin()
        return self.values[:count]

net, probe = Net(), torch.randn(5, 4)
optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)

"""


COMPUTING = [False]


class Step:
    """The function is called within the step's own code, as far as leftovers know."""

    def __init__(self, number):
        self.number, self.epoch = number, (number - 1) // 6

    def mean_loss(self, function):
        COMPUTING[0] = True
        try:
            return float(function(None))
        finally:
            COMPUTING[0] = False


Step.__module__ = "elastic.train.step"


def refusal(recipe, *, count=24, kept=(), said=None):
    """What ends the run; empty for a run that ends by itself. said: takes what each step says."""
    names: dict = {}
    exec(STEPS, names)
    said = [] if said is None else said
    space = {"__name__": "recipe", "elastic": elastic}

    def run_steps(**objects):
        state = elastic.State(**objects)
        leftovers = Leftovers(state, lambda: COMPUTING[0])
        memory = LoopMemory(
            state=state,
            last_step=count,
            left_out=[names, space, Step, said],
            report=lambda _found: None,
            body=Unread(state=state, dataset=None, settings=(modules := ModuleSettings(state=state))),
            settings=DatasetSettings(dataset=None, collate=None),
            modules=modules,
            places=BodyPlaces(state, leftovers),
        )
        return names["steps_of"](memory, leftovers, count, Step, kept, said)

    space["run_steps"] = run_steps
    try:
        exec(compile(HEADER + textwrap.dedent(recipe), "/recipes/recipe.py", "exec"), space)
    except UsageError as error:
        return str(error)
    return ""


INTO_STATE = "changes the State by it"
READ = {
    "an attribute of a module of the State": (
        "net.hidden",
        INTO_STATE,
        """
        for step in run_steps(net=net):
            if net.hidden is not None:
                net.center.lerp_(net.hidden.mean(0), 0.1)
            net.move()
            net(probe)
        """,
    ),
    "of a teacher outside the State": (
        "teacher.hidden",
        INTO_STATE,
        """
        teacher = Net()
        for step in run_steps(net=net):
            if step.number > 1:
                net.center.lerp_(teacher.hidden.mean(0), 0.1)
            teacher(probe)
        """,
    ),
    "a decision": (
        "net.hidden",
        "decides by it",
        """
        for step in run_steps(net=net, optimizer=optimizer):
            if net.hidden is not None and net.hidden.mean() > 9:
                optimizer.param_groups[0]["lr"] = 0.05
            net.move()
            net(probe)
        """,
    ),
    "a function of a step": (
        "net.hidden",
        "computes with it",
        """
        for step in run_steps(net=net):
            step.mean_loss(lambda batch: 1.0 if net.hidden is None else net.hidden.mean())
            net.move()
            net(probe)
        """,
    ),
    "an object's attribute": (
        "probes.last",
        INTO_STATE,
        """
        probes = Probe(net)
        for step in run_steps(net=net):
            if probes.last is not None:
                net.center.lerp_(probes.last.mean(0), 0.1)
            net.move()
            probes.look(probe)
        """,
    ),
    "a dict that an object keeps": (
        "probes.found['last']",
        INTO_STATE,
        """
        probes = Probe(net)
        for step in run_steps(net=net):
            if probes.found:
                net.center.lerp_(probes.found["last"].mean(0), 0.1)
            net.move()
            probes.look(probe)
        """,
    ),
    "a dict that a hook fills": (
        "found['features']",
        INTO_STATE,
        """
        found = {}
        net.body.register_forward_hook(lambda module, inputs, output: found.update(features=output))
        for step in run_steps(net=net):
            if found:
                net.center.lerp_(found["features"].mean(0), 0.1)
            net.move()
            net(probe)
        """,
    ),
    "a dict in a dict of a list, made by each forward": (
        "lists.out[1]['scaled']",
        INTO_STATE,
        """
        lists = InList()
        for step in run_steps(net=net, lists=lists):
            if lists.out:
                net.center.lerp_(lists.out[1]["scaled"].mean(0), 0.1)
            lists.move()
            lists(probe)
        """,
    ),
    "a namespace, made by each forward": (
        "spaces.out.hidden",
        INTO_STATE,
        """
        spaces = InNamespace()
        for step in run_steps(net=net, spaces=spaces):
            if spaces.out:
                net.center.lerp_(spaces.out.hidden.mean(0), 0.1)
            spaces.move()
            spaces(probe)
        """,
    ),
    "an attribute of a class": (
        "Table.newest",
        INTO_STATE,
        """
        for step in run_steps(net=net):
            if Table.newest is not None:
                net.center.lerp_(Table.newest.mean(0), 0.1)
            net.move()
            Table.newest = net(probe)
        """,
    ),
    "an attribute of a parameter": (
        "net.body.weight.before",
        INTO_STATE,
        """
        for step in run_steps(net=net):
            if step.number > 1:
                net.center.lerp_(net.body.weight.before.mean(1), 0.1)
            net.move()
            net.body.weight.before = net.body.weight.detach().clone()
        """,
    ),
    "a mean over steps that forwards of the body make": (
        "means.mean",
        INTO_STATE,
        """
        means = Mean()
        for step in run_steps(net=net, means=means):
            means(probe * step.number)
            net.center.lerp_(means.mean.mean(0), 0.1)
        """,
    ),
}


@pytest.mark.parametrize(("path", "does", "recipe"), READ.values(), ids=READ)
def test_what_each_steps_body_leaves_in_an_object_is_refused_where_the_next_step_uses_it(path, does, recipe):
    """No function of a step shows the place. Four steps tell that each of them fills it."""
    said = refusal(recipe)
    assert said.startswith("step 5: ")
    assert f"reads {path}, which the loop's body left there in step 4, and {does}" in said
    assert "a process that restarts in between has none, or another one" in said


COMPILED = """
        compiled = torch.compile(net, backend="eager")
        twice = torch.compile(lambda hidden: 2 * hidden.mean(0), backend="eager")
        for step in run_steps(net=net):
            {}
            compiled(probe)
        """


@pytest.mark.parametrize(
    ("use", "does"),
    [
        ("if net.hidden is not None: net.center.lerp_(twice(net.hidden), 0.1)", INTO_STATE),
        (
            "if net.hidden is not None: step.mean_loss(lambda _batch: twice(net.hidden)[0])",
            "computes with it",
        ),
    ],
)
def test_a_compiled_function_that_is_given_it_is_refused_as_a_plain_one(use, does):
    """Traced, it met a mark that is none, and the run ended with an error of torch's own."""
    said = refusal(COMPILED.format(use))
    assert f"reads net.hidden, which the loop's body left there in step 4, and {does}" in said


def test_a_compiled_forward_may_be_given_what_it_left_where_nothing_else_uses_it():
    assert (
        refusal(COMPILED.format("compiled(probe if net.hidden is None else net.hidden[:, [0, 1, 2, 0]])"))
        == ""
    )


def test_where_each_step_is_kept_it_is_found_a_step_earlier():
    said = refusal(READ["an object's attribute"][2], kept=range(1, 25))
    assert said.startswith("step 4: ")


def test_what_begins_late_is_found_where_a_look_sees_that_it_changed():
    """From step 9 on. A look that sees the change wants more of them."""
    said = refusal(
        """
        for step in run_steps(net=net):
            if step.number >= 9:
                if net.hidden is not None:
                    net.center.lerp_(net.hidden.mean(0), 0.1)
                net.move()
                net(probe)
        """
    )
    assert re.match(r"step 1\d: the loop's body reads net\.hidden", said)


def test_a_number_of_it_is_named_once():
    said = []
    body = """
        for step in run_steps(net=net, optimizer=optimizer):
            if net.hidden is not None:
                optimizer.param_groups[0]["lr"] = 0.05 + net.hidden.mean().item()
            net(probe * step.number)
        """
    assert refusal(body, said=said) == ""
    notes = list(filter(None, said))
    assert len(notes) == 1
    assert "reads net.hidden, which the loop's body left there in an earlier step" in notes[0]


HARMLESS = {
    "filled before it is read": """
        for step in run_steps(net=net):
            net.move()
            net(probe)
            net.center.lerp_(net.hidden.mean(0), 0.1)
        """,
    "by a function of the step itself": """
        def loss_of(batch):
            net(probe)
            return net.hidden.mean()
        for step in run_steps(net=net):
            step.mean_loss(loss_of)
            net.move()
            net(probe)
        """,
    "only shown": """
        shown = []
        for step in run_steps(net=net):
            if step.number > 1:
                shown.append(f"{net.hidden.mean():.3f} {net.hidden.shape}")
            net.move()
            net(probe)
        """,
    "a container of a hook, filled before it is read": """
        found = {}
        net.body.register_forward_hook(lambda module, inputs, output: found.update(features=output))
        names = types.SimpleNamespace(found=found)
        for step in run_steps(net=net):
            net.move()
            net(probe)
            net.center.lerp_(names.found["features"].mean(0), 0.1)
            assert names.found is found
        """,
    "a list that stays and has two names": """
        class Held(Net):
            def __init__(self, out):
                super().__init__()
                self.out = out
            def keep(self, hidden):
                self.out[0] = hidden
        kept = [torch.zeros(1)]
        held = Held(kept)
        for step in run_steps(net=net, held=held):
            held.move()
            held(probe)
            net.center.lerp_(kept[0].mean(0), 0.1)
            assert held.out is kept
        """,
    "a table that grows with its use": """
        table = Grown()
        for step in run_steps(net=net):
            net.center.lerp_(table(3), 0.1)
            table(2 + 2 * step.number)
        """,
    "a table that follows the epoch": """
        table = Table()
        for step in run_steps(net=net):
            if table.epoch != step.epoch:
                table.refresh(step.epoch)
            net.center.lerp_(table.values, 0.1)
        """,
    "a weight that follows from parameters": """
        other = Net()
        torch.nn.utils.weight_norm(other.body)
        for step in run_steps(net=net, other=other):
            net.center.lerp_(other.body.weight.detach().mean(1), 0.1)
            with torch.no_grad():
                other.body.weight_g.mul_(1.01)
            other(probe)
        """,
    "what the state_dict of its object has": """
        class Bank:
            def __init__(self):
                self.newest = torch.zeros(5, 3)
            def push(self, x):
                self.newest = x
            def state_dict(self):
                return {"bank": self.newest.clone()}
            def load_state_dict(self, state):
                self.newest = state["bank"]
        bank = Bank()
        for step in run_steps(net=net, bank=bank):
            net.center.lerp_(bank.newest.mean(0), 0.1)
            net.move()
            bank.push(net(probe))
        """,
    "what the extra state of its module has": """
        class Extra(Net):
            def get_extra_state(self):
                return {"h": None if self.hidden is None else self.hidden.clone()}
            def set_extra_state(self, state):
                self.hidden = state["h"]
        extra = Extra()
        for step in run_steps(net=net, extra=extra):
            if extra.hidden is not None:
                net.center.lerp_(extra.hidden.mean(0), 0.1)
            extra.move()
            extra(probe)
        """,
}


@pytest.mark.parametrize("kept", [(), range(1, 25)], ids=["none kept", "each step kept"])
@pytest.mark.parametrize("recipe", HARMLESS.values(), ids=HARMLESS)
def test_what_a_step_fills_before_it_reads_it_is_left_alone(recipe, kept):
    """And so are caches, and what the State saves under another name."""
    said = []
    assert refusal(recipe, kept=kept, said=said) == ""
    assert not any(said)
