"""What a loop reaches by ways that its own lines do not show: functions that only torch calls,
attributes of containers, long lists, deep objects, modules that are imported late.

Each loop changes something there in every step, and a process that restarts has it as the script
makes it.
"""

import functools
import random
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.stale_copies import Attribute
from elastic.train.dataset_contents import DatasetContents
from elastic.train.unsaved_sentences import sentence
from elastic.train.words import MANY_PLAIN, TEXT, hash_of_plain, plain_text
from tests.pure import test_loop_memory as loops

COUNTING = """
def make():
    it = 0
    def count(*given):
        nonlocal it
        it += 1
        return 1 / it
    return count
"""
LISTING = """
it = [0]
def count(*given):
    it[0] += 1
    return 1 / it[0]
"""
WARMUP = """
class Warmup:
    it = 0
    def factor(self, epoch):
        self.it += 1
        return 1 / self.it
    @classmethod
    def of_class(cls, epoch):
        cls.it += 1
        return 1 / cls.it
    def __call__(self, epoch):
        Warmup.it += 1
        return 1 / Warmup.it
"""
# What the loop steps, in the State: the script.
CALLED_BY_TORCH = {
    "a list, by LambdaLR": f"{LISTING}it_is = torch.optim.lr_scheduler.LambdaLR(optimizer, count)",
    "a closure, by LambdaLR": f"{COUNTING}it_is = torch.optim.lr_scheduler.LambdaLR(optimizer, make())",
    "one in a list": f"{COUNTING}it_is = torch.optim.lr_scheduler.LambdaLR(optimizer, [make()])",
    "a method": f"{WARMUP}it_is = torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup().factor)",
    "a class's method": f"{WARMUP}it_is = torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup.of_class)",
    "an object that counts for its class": f"{WARMUP}it_is = torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup())",
    "a partial": f"{LISTING}it_is = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(count, 1))",
    "by MultiplicativeLR": f"{LISTING}it_is = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, count)",
    "by CyclicLR": f"{LISTING}it_is = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, scale_fn=count)",
    "a closure, by CyclicLR": f"{COUNTING}it_is = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, scale_fn=make())",
    "below SequentialLR": f"{COUNTING}S = torch.optim.lr_scheduler\nit_is = S.SequentialLR(optimizer, [S.LambdaLR(optimizer, make()), S.StepLR(optimizer, 2)], [9])",
    "below ChainedScheduler": f"{LISTING}S = torch.optim.lr_scheduler\nit_is = S.ChainedScheduler([S.LambdaLR(optimizer, count)])",
}
HOOKS = {
    "of an optimizer": "handle = optimizer.register_step_post_hook({})",
    "of all optimizers": "from torch.optim.optimizer import register_optimizer_step_pre_hook as register; handle = register({})",
    "of all optimizers, afterwards": "from torch.optim.optimizer import register_optimizer_step_post_hook as register; handle = register({})",
}
IN_STEP = {
    "a dict": ("class D(dict):\n    n = 0.0\nit = D()", "it.n += 1"),
    "a dict that lacks a key": (
        "class D(dict):\n    n = 0\n    def __missing__(self, key):\n        self.n += 1\n        return self.n\nit = D()",
        "it[step.number]",
    ),
    "a list": (
        "class L(list):\n    def __init__(self):\n        self.best = 9.0\nit = L()",
        "it.best *= 0.9",
    ),
    "an array": ("class A(np.ndarray): pass\nit = np.zeros(2).view(A)\nit.n = 0", "it.n += 1"),
    "a text": ("class T(str):\n    n = 0\nit = T('a')", "it.n += 1"),
    "a number": ("class N(float):\n    n = 0\nit = N(0.5)", "it.n += 1"),
    "a class of a dict": ("class it(dict):\n    n = 0\nheld = it()", "type(held).n += 1"),
    "the step before": ("it = None", "last = it and it.number; it = step"),
    "the step before, in a list": ("it = [None]", "it[0] = step"),
    "a long list": ("it = [0.0] * 4000", "it[777] += 1"),
    "a longer list": ("it = [0.0] * 100_000", "it[-2] -= 1"),
    "a file in memory of a class of its own": (
        "import io\nclass F(io.StringIO):\n    def tell(self): raise RuntimeError\nit = F()",
        "it.write('a')",
    ),
    "what a metaclass keeps": (
        (
            "class it(type):\n    kept = {}\n    def __getattr__(cls, name): return it.kept.get(name, 0)\n"
            "    def __setattr__(cls, name, value): it.kept[name] = value\nclass C(metaclass=it): pass"
        ),
        "C.n = C.n + 1",
    ),
    "a large dict": ("it = dict.fromkeys(range(20_000), 0.0)", "it[7777] += 1"),
    "a long list of words": ("it = ['a'] * 4000", "it[777] += 'a'"),
    "a large set": ("it = set(range(4000))", "it.remove(max(it)); it.add(9000 + step.number)"),
    "a deep object": (
        "class O: pass\nit = last = O()\nfor _ in range(20):\n    last.n = O(); last = last.n\nlast.k = 0\ndel last\ndef deepest():\n    each = it\n    while hasattr(each, 'n'):\n        each = each.n\n    return each",
        "deepest().k += 1",
    ),
}


def outcome_of(before, in_step="", objects="", count=6):
    recipe = f"{before}\nfor step in run_steps(model=model, optimizer=optimizer{objects}):\n    update()\n    {in_step}\n"
    return loops.outcome(recipe, count=count)


@pytest.mark.parametrize("habit", CALLED_BY_TORCH)
def test_a_number_of_a_function_that_only_a_scheduler_calls_is_named(habit):
    """The loop calls `step()` of the schedule, and none of its lines names the function."""
    refused, changing, _ = outcome_of(CALLED_BY_TORCH[habit], "it_is.step()", ", schedule=it_is")
    assert not refused
    assert any(name == "it" or name.endswith(".it") for name in changing)


def test_a_tensor_that_only_a_scheduler_changes_is_refused():
    recipe = "it = torch.ones(1)\ndef factor(epoch):\n    it.mul_(0.9)\n    return float(it)\nschedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"
    refused, _, _ = outcome_of(recipe, "schedule.step()", ", schedule=schedule")
    assert refused.startswith("it was changed between step ")


def test_what_a_scheduler_saves_of_its_functions_is_left_alone():
    """torch's state_dict has the attributes of an object that is called, and its own numbers."""
    recipe = (
        "class Warmup:\n    def __init__(self):\n        self.i = 0\n    def __call__(self, epoch):\n        self.i += 1\n        return 1 / self.i\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup())"
    )
    assert outcome_of(recipe, "schedule.step()", ", schedule=schedule") == ("", set(), set())
    recipe = "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9 ** epoch)"
    assert outcome_of(recipe, "schedule.step()", ", schedule=schedule") == ("", set(), set())


@pytest.mark.parametrize("made", [LISTING, f"{COUNTING}count = make()"], ids=["a list", "a closure"])
@pytest.mark.parametrize("habit", HOOKS)
def test_a_number_of_a_hook_of_an_optimizer_is_named(habit, made):
    lines = f"{made}\n{HOOKS[habit].format('lambda *given: count() and None')}"
    refused, changing, _ = loops.outcome(
        f"{lines}\nfor step in run_steps(model=model, optimizer=optimizer):\n    update()\nhandle.remove()"
    )
    assert not refused
    assert changing == {"it"}


@pytest.mark.parametrize("made", [LISTING, f"{COUNTING}count = make()"], ids=["a list", "a closure"])
def test_a_number_of_the_function_of_an_averaged_model_is_named(made):
    recipe = f"{made}\nmean = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, n: a + (p - a) * count())"
    refused, changing, _ = outcome_of(recipe, "mean.update_parameters(model)", ", mean=mean")
    assert not refused
    assert changing == {"it"}


@pytest.mark.parametrize("habit", IN_STEP)
def test_what_a_step_leaves_in_this_is_named(habit):
    refused, changing, _ = outcome_of(*IN_STEP[habit])
    assert not refused
    assert any(name == "it" or name.startswith(("it.", "it[")) for name in changing)


def test_weights_in_an_attribute_of_a_dict_are_refused():
    recipe = "class Tracker(dict):\n    def __init__(self):\n        self.best = None\nit = Tracker()"
    in_step = "if step.number == 3: it.best = [p.detach().clone() for p in model.parameters()]"
    assert outcome_of(recipe, in_step)[0].startswith("it.best")


@pytest.mark.parametrize(
    ("before", "in_step"),
    [
        ("", "now = step; print(now.number, end='\\r')"),
        ("def last():\n    return step.number", "last()"),
    ],
)
def test_a_step_that_each_pass_sets_first_is_left_alone(before, in_step):
    assert outcome_of(before, in_step) == ("", set(), set())


def test_a_step_that_the_first_line_of_the_body_gives_an_object_is_left_alone():
    recipe = """
        class Trainer:
            def now(self):
                return self.step.number
        it = Trainer()
        for step in run_steps(model=model, optimizer=optimizer):
            it.step = step
            update()
            it.now()
        """
    assert loops.outcome(recipe, count=6) == ("", set(), set())


def test_the_step_of_a_loop_with_two_targets_is_left_alone():
    recipe = "for number, step in enumerate(run_steps(model=model, optimizer=optimizer)):\n    update(); print(step.number, number)"
    assert loops.outcome(recipe, count=6)[1] == {"number"}


IMPORTED = {
    "in a function": (
        "def rate():\n    import late_settings\n    late_settings.k += 1\n    return late_settings.k",
        "rate()",
    ),
    "of a package, in a function": (
        "def rate():\n    from late_settings import add\n    return add()",
        "rate()",
    ),
    "in the body": ("", "import late_settings; late_settings.k += 1"),
    "by its name": ("import importlib", "c = importlib.import_module('late_settings'); c.k += 1"),
    "by its name, in a function": (
        "import importlib\ndef rate():\n    c = importlib.import_module('late_settings')\n    c.k += 1",
        "rate()",
    ),
}


@pytest.mark.parametrize("habit", IMPORTED)
def test_a_number_of_an_own_module_that_the_loop_imports_is_named(habit, monkeypatch):
    """No variable of the script names the module where a pass begins."""
    module = types.ModuleType("late_settings")
    module.__file__ = "/recipes/late_settings.py"
    text = "k = 0\ndef add():\n    global k\n    k += 1\n    return k"
    exec(compile(text, module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "late_settings", module)
    refused, changing, _ = outcome_of(*IMPORTED[habit])
    assert not refused
    assert changing == {"late_settings.k"}


PLAIN = st.integers(-3, 3) | st.integers() | st.floats(allow_nan=False) | st.text() | st.none() | st.binary()


# An object whose class raises an error, or draws, where Python asks it something.
ASKED = {
    "a list": "class it(list):\n    def __len__(self): raise KeyError\n    __iter__ = __getitem__ = __len__\nheld = it([1])",
    "a dict": "class it(dict):\n    def __len__(self): raise KeyError\n    __iter__ = items = values = __len__\nheld = it(a=1)",
    "a set": "class it(set):\n    def __len__(self): raise KeyError\n    __iter__ = __len__\nheld = it([1])",
    "a list that draws": "import random\nclass it(list):\n    def __getitem__(self, at): return random.random()\nheld = it([1])",
    "a list that counts": "class it(list):\n    n = 0\n    def __len__(self):\n        self.n += 1\n        return 1\nheld = it([1])",
    "a hidden slot": "class A:\n    __slots__ = ('rate',)\nclass it(A):\n    rate = 0.2\nheld = it()",
    "a closed buffer": "import io\nheld = io.BytesIO()\nheld.close()",
    "a long range": "held = iter(range(2**70))",
    "an empty view": "held = memoryview(np.zeros((0, 3)))",
    "a lazy module": "held = nn.LazyLinear(3)",
    "pairs of what has no text": "import itertools\nclass R:\n    def __repr__(self): raise KeyError\nheld = itertools.product([R(), R()], repeat=2)\nnext(held)",
    "a proxy of nothing": "import weakref\nclass T: pass\nheld = weakref.proxy(T())",
    "a tensor of its own class": "class W(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, *given, **more): raise KeyError\nheld = torch.zeros(2).as_subclass(W)",
}
HELD = "class Box: pass\nbox = Box()\nbox.held = held"


@pytest.mark.parametrize("kind", ASKED)
def test_a_look_does_not_ask_an_object_that_has_code_of_its_own(kind):
    """Nothing is refused or named that the loop leaves alone, and no random number is drawn."""
    random.seed(0)
    refused, changing, _ = outcome_of(f"{ASKED[kind]}\n{HELD}", "box.held")
    assert (refused, changing) == ("", set())
    assert random.random() == random.Random(0).random()


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_what_cannot_be_looked_at_is_named_and_the_rest_is_looked_at():
    """torch raises an error where it is asked for the memory of such a tensor."""
    found = []
    recipe = """
        class Box: pass
        box = Box()
        box.odd = torch.quantize_per_channel(torch.zeros(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
        box.count = 0
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            box.odd
            box.count += 1
        """
    loops.outcome(recipe, found=found)
    assert [name for each in found for name in each.unreadable] == ["box.odd (RuntimeError)"]
    assert [name for each in found for name in each.changing] == ["box.count"]
    assert "box.odd (RuntimeError) cannot be looked at, because" in sentence(found[0])


@pytest.mark.parametrize("text", ["a" * 10**6, b"a" * 10**6])
def test_a_long_text_is_not_written_out(text):
    """A look would take as long as a copy of the whole corpus."""
    assert len(plain_text(text)) < 3 * TEXT
    assert plain_text(text) != plain_text(text[:-1] + text[:1].upper())


@given(st.lists(PLAIN), st.lists(PLAIN))
def test_lists_of_numbers_and_words_have_the_same_mark_only_where_they_are_equal(one, other):
    def kinds(values):
        return [(type(each), repr(each)) for each in values]

    is_same = kinds(one) == kinds(other)
    assert (hash_of_plain(one) == hash_of_plain(other)) == is_same
    assert hash_of_plain([*one, object()]) is None


def test_a_list_above_the_limit_has_no_mark_of_all():
    assert hash_of_plain([0] * MANY_PLAIN) is not None
    assert hash_of_plain([0] * (MANY_PLAIN + 1)) is None


def test_what_the_loop_writes_into_a_partial_of_the_dataset_is_found():
    """`dataset.transform.keywords["sigma"] = 0.1` leaves the partial the same object."""
    made = functools.partial(max, 1.0, key=None)
    attributes = {"dataset.transform": Attribute(made, 0)}
    contents = DatasetContents()
    assert contents.read(attributes) == []
    made.keywords["key"] = abs
    assert contents.read(attributes) == ["dataset.transform"]
    assert contents.read(attributes) == []
