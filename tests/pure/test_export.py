"""A committed state's weights become a file that other programs load, or no file at all."""

import resource

import pytest
import torch
from committed import begin_run, commit_in
from records import IDENTITY
from saved_state import Holder
from torch import nn

from elastic.checkpoint.payload_check import check_state
from elastic.cli import main
from elastic.errors import EXIT_USAGE
from elastic.report import export
from elastic.train.state.state import State


def average(step=0):
    """As recipes keep an average of the weights: tensors in one dict, and a number beside them."""
    return Holder({"shadow": {"a.weight": torch.arange(4.0) + step}, "decay": 0.99})


def mixed():
    """Each kind of tensor: bf16 weights, BatchNorm's buffers (an int64 among them), channels_last,
    one without elements, and an output layer that has the weights of its embedding.
    """
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Linear(4, 3, dtype=torch.bfloat16))
    model.extend([nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)])
    model[4].weight = model[3].weight
    model[0].to(memory_format=torch.channels_last)
    model.register_buffer("none", torch.zeros(0, 3))
    model[1](torch.randn(2, 4, 3, 3))
    return model


@pytest.fixture
def make_run(tmp_path):
    def make(step=10, **objects):
        folder = tmp_path / "run"
        if not folder.exists():
            begin_run(folder, IDENTITY)
        commit_in(folder, IDENTITY, step, State(**objects))
        return folder

    return make


def same(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def test_a_module_loads_the_file_of_its_own_weights(make_run, tmp_path, monkeypatch):
    """Under the names of its state_dict, buffers and tied weights included, bit for bit."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    trained = mixed()
    run = make_run(model=trained, optimizer=torch.optim.AdamW(trained.parameters()))
    file = tmp_path / "m.pth"

    assert main(["export", str(run), str(file)]) == 0

    found = torch.load(file, weights_only=True)
    assert same(found, dict(trained.state_dict()))
    mixed().load_state_dict(found)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".m")]


class Converting(nn.Linear):
    """Weights of version 1 were half as large."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize("part", ["", "0.1"])
def test_a_part_of_a_module_keeps_the_versions_of_its_layers(part, make_run, tmp_path):
    def made():
        return nn.Sequential(nn.Sequential(nn.ReLU(), Converting(2, 2)), nn.Linear(2, 1))

    file = tmp_path / "m.pth"
    run = make_run(model=(trained := made()))
    assert main(["export", str(run), str(file), "--entry", f"model.{part}".rstrip(".")]) == 0

    fresh = made().get_submodule(part)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert same(dict(fresh.state_dict()), dict(trained.get_submodule(part).state_dict()))


def test_the_step_that_is_named_is_exported_and_else_the_newest(make_run, tmp_path):
    """Which state that is where one is damaged, test_find_parent.py shows."""
    for step in (20, 30):
        run = make_run(step, count=average(step))
    file = tmp_path / "m.pt"
    for named, value in (("@20", 20.0), ("", 30.0)):
        words = [f"{run}{named}", str(file), "--entry", "count.shadow", "--overwrite"]
        assert main(["export", *words]) == 0
        assert torch.load(file)["a.weight"][0] == value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("m.pth --entry models", "expected an entry 'models', found average, model; give --entry NAME"),
        ("m.pth --entry model.2", "expected an entry 'model.2', found model."),
        ("m.pth --entry average", "two of one name, in average.decay; give --entry NAME for a part"),
        ("m.bin", "expected a local FILE that ends in .safetensors, or in .pth or .pt"),
        ("no/such/m.pt", "expected to write no/such/m.pt, found"),
        ("folder.pt --overwrite", "expected to write folder.pt, found"),
        ("taken.pt", "exists; take another name, or replace it with --overwrite"),
    ],
)
def test_what_cannot_be_exported_is_refused(words, says, make_run, tmp_path, printed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "taken.pt").write_text("precious")
    run = make_run(model=nn.Linear(2, 1), average=average())
    assert says in printed(2, "export", run, *words.split())
    assert (tmp_path / "taken.pt").read_text() == "precious" and not (tmp_path / "m.pth").exists()


def test_a_full_disk_leaves_no_file_and_what_was_there(make_run, tmp_path, monkeypatch, capsys):
    """A limit on the size of files: the write fails half-way, as on a full disk."""
    run, file = make_run(model=nn.Linear(200, 200)), tmp_path / "m.pth"
    file.write_text("precious")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def read_before_it_is_full(*where):
        check_state(*where)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))

    monkeypatch.setattr(export, "check_state", read_before_it_is_full)
    try:
        assert main(["export", str(run), str(file), "--overwrite"]) == EXIT_USAGE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"expected to write {file}, found" in capsys.readouterr().err
    assert file.read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name]
