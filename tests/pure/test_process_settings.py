"""Settings of the whole process that a loop leaves changed: a process that restarts lacks them."""

import os

import numpy as np
import pytest
import torch

from elastic.train.process_settings import read_settings
from tests.pure import test_loop_memory as loops

LEFT = {
    "torch.get_default_dtype() was torch.float32 and is torch.float64": "torch.set_default_dtype(torch.float64)",
    "torch.get_default_device() was cpu and is meta": "torch.set_default_device('meta')",
    "torch.are_deterministic_algorithms_enabled() was False and is True": "torch.use_deterministic_algorithms(True)",
    "torch.get_float32_matmul_precision() was highest and is high": "torch.set_float32_matmul_precision('high')",
    "torch.backends.cudnn.benchmark was False and is True": "torch.backends.cudnn.benchmark = True",
    "torch.is_grad_enabled() was True and is False": "torch.autograd.set_grad_enabled(False)",
    "torch.get_num_threads() was": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "np.geterr() was": "np.seterr(over='ignore')",
    "torch.set_flush_denormal(...) was False and is True": "torch.set_flush_denormal(True)",
    "torch.backends.mha.get_fastpath_enabled() was True and is False": "torch.backends.mha.set_fastpath_enabled(False)",
    "torch.autograd.graph.saved_tensors_hooks was None and is open with half and float": "torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float).__enter__()",
}
RECIPE = """
    for step in run_steps(model=model, optimizer=optimizer):
        if step.number == 3:
            {}
    """


@pytest.fixture(autouse=True)
def put_back():
    """All that the recipes here set."""
    threads, errors = torch.get_num_threads(), np.geterr()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)
    np.seterr(**errors)
    torch.set_flush_denormal(False)
    torch.backends.mha.set_fastpath_enabled(True)
    os.environ.pop("PHASE", None)
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


@pytest.mark.parametrize("setting", LEFT)
def test_a_setting_of_the_process_that_the_loop_leaves_changed_is_refused_with_both_values(setting):
    refused, _, _ = loops.outcome(RECIPE.format(LEFT[setting]))
    start = "between step 3 and step 4 the loop has changed a setting of the whole process: "
    assert refused.startswith(start), refused
    assert setting in refused


def test_a_setting_that_is_put_back_in_its_step_or_made_before_the_loop_is_left_alone():
    """As by a context manager, which torch's own functions use as well."""
    recipe = """
        torch.set_default_dtype(torch.float64)
        model.double()
        for step in run_steps(model=model, optimizer=optimizer):
            with torch.no_grad(), np.errstate(over="ignore"), torch.autocast("cpu"):
                model(torch.randn(8, 4))
            with torch.autograd.graph.save_on_cpu():
                update()
        """
    assert loops.outcome(recipe) == ("", set(), set())


def test_variables_of_the_environment_and_hooks_of_all_modules_are_named():
    recipe = """
        import os
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number == 2:
                os.environ["PHASE"] = "2"
                os.environ["PYTHONHASHSEED"] = "2"  # by a set_seed(): fixed for all processes of a run
                hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
        hook.remove()
        """
    refused, changing, _ = loops.outcome(recipe)
    assert refused == ""
    assert changing == {"PHASE of os.environ", "torch.nn.modules.module._global_forward_hooks"}


def test_a_working_directory_that_the_loop_leaves_is_named(tmp_path, monkeypatch):
    """Files that the recipe names without a folder are then others after a restart."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    recipe = """
        import os
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number == 2:
                os.chdir("below")
        """
    refused, changing, _ = loops.outcome(recipe)
    assert (refused, changing) == ("", {"the working directory"})


def test_every_setting_can_be_read_where_old_and_new_names_of_torch_are_mixed():
    """torch raises an error where one flag was set by both of its names."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert read_settings() == read_settings()
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_a_working_directory_that_is_removed_ends_no_run(tmp_path, monkeypatch):
    """`Path.cwd()` raises then, and so would each look."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = read_settings()
    folder.rmdir()
    assert read_settings() != before
