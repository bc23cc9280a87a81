"""The launcher's variables become one value, or an error that names the malformed variable."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from elastic.config import environment
from elastic.config.environment import AGENT, PREFLIGHT, RUN_DIR, AgentLink, SlurmJob
from elastic.divergence import Divergence
from elastic.errors import UsageError

KEPT = ":".join(environment.KEEP_FREED)

NUMBERS = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
DIVERGENCE = Divergence(generation=2, step=9, agreed=8, entry="m.w", votes=(1, 2), nodes=("a", "b"))
LINK = AgentLink(
    pid=7,
    node="a",
    run_dir='runs/x "y"',
    generation=3,
    control_page="/proc/7/fd/3",
    uploader="/run/socket",
    snapshot_every="auto",
    audit="auto",
    balance="auto",
    memory="",
    failures=0,
    divergence=DIVERGENCE,
    save_every="10min",
    error_folder="/run/errors",
    faults=None,
)


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """An environment without a launcher, and without the threads that other tests pinned."""
    for name in [*NUMBERS, "MASTER_ADDR", AGENT, PREFLIGHT, RUN_DIR]:
        monkeypatch.delenv(name, raising=False)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what pin_threads sets
        monkeypatch.delenv(name)
    return monkeypatch


def test_without_a_launcher_the_world_size_is_one():
    """The script was started by plain python."""
    launch = environment.read()
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (0, 1, 0, 1)
    assert launch.agent is launch.preflight is launch.run_dir is None
    assert not launch.is_distributed


def test_the_variables_of_torchrun_give_ranks_and_world_sizes(bare):
    """All four numbers differ, so that a swap shows."""
    for name, value in NUMBERS.items():
        bare.setenv(name, value)
    bare.setenv("MASTER_ADDR", "localhost")
    launch = environment.read()
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (5, 8, 1, 4)
    assert launch.is_distributed


def test_a_preflight_never_joins_a_group(bare):
    """torchrun started the agent, whose preflight inherits MASTER_ADDR."""
    bare.setenv("MASTER_ADDR", "localhost")
    bare.setenv(PREFLIGHT, "/tmp/answer")
    assert not environment.read().is_distributed


def test_the_link_to_the_agent_survives_the_environment(bare):
    """Values with spaces and quotes among them."""
    for name, value in LINK.to_env().items():
        bare.setenv(name, value)
    bare.setenv(RUN_DIR, "runs/other")
    launch = environment.read()
    assert launch.agent == LINK
    assert launch.run_dir == "runs/other"


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["", "x", "-1", "1.5"])
def test_a_variable_that_is_not_a_number_is_named(bare, name, value):
    """A mistake in a batch script."""
    bare.setenv(name, value)
    with pytest.raises(UsageError, match=rf"variable {name}, found {value!r}"):
        environment.read()


def test_the_number_of_threads_is_one_unless_it_is_set(bare):
    """The result depends on the number of threads, so it must not follow the machine."""
    assert environment.pin_threads() == 1
    assert environment.pin_threads() == 1  # the second reading is what the first one pinned
    bare.setenv("OMP_NUM_THREADS", "3")
    assert environment.pin_threads() == 3


@pytest.mark.parametrize("value", ["", "0", "many", "-2", "4,2"])
def test_a_malformed_number_of_threads_is_refused(bare, value):
    """With "4,2" OpenMP nests its threads: there is no single number."""
    bare.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(UsageError, match="OMP_NUM_THREADS, found"):
        environment.pin_threads()


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [
        ("always [madvise] never", None, f"glibc.malloc.hugetlb=1:{KEPT}"),
        (
            "always [madvise] never",
            "glibc.malloc.check=3",
            f"glibc.malloc.check=3:glibc.malloc.hugetlb=1:{KEPT}",
        ),
        ("always [madvise] never", "glibc.malloc.hugetlb=0", f"glibc.malloc.hugetlb=0:{KEPT}"),
        (
            "always [madvise] never",
            "glibc.malloc.trim_threshold=1:glibc.malloc.hugetlb=0:glibc.malloc.mmap_threshold=2",
            None,
        ),
        ("[always] madvise never", None, KEPT),
        (
            "always madvise [never]",
            "glibc.malloc.mmap_threshold=2",
            f"glibc.malloc.mmap_threshold=2:{environment.KEEP_FREED[1]}",
        ),
    ],
)
def test_the_process_restarts_once_for_the_settings_of_malloc_that_help(bare, tmp_path, mode, before, after):
    """execv is recorded, not run; a second call changes nothing."""
    begun = []
    (tmp_path / "enabled").write_text(mode)
    bare.setattr(environment, "LARGE_PAGES", tmp_path / "enabled")
    bare.setattr(environment.os, "execv", lambda *words: begun.append(words))
    bare.setenv("GLIBC_TUNABLES", before or "")
    bare.setenv("PYTHONHASHSEED", "0")
    bare.setattr(environment.sys, "flags", SimpleNamespace(hash_randomization=0))
    for _ in range(2):
        environment.restart_interpreter()
    assert os.environ["GLIBC_TUNABLES"] == (after or before or "")
    assert len(begun) == (after is not None)


@pytest.mark.parametrize(
    ("found", "says"), [(None, ""), ("random", ""), ("5", "PYTHONHASHSEED is 0"), ("0", None)]
)
def test_the_process_restarts_once_for_fixed_string_hashing(bare, tmp_path, capsys, found, says):
    """Two nodes whose shells set different hash seeds would build sets in different orders.

    execv is recorded, not run; the second call is that of the restarted process.
    """
    begun = []
    bare.setattr(environment, "LARGE_PAGES", tmp_path / "none")
    bare.setenv("GLIBC_TUNABLES", KEPT)
    bare.setattr(environment.os, "execv", lambda *words: begun.append(words))
    bare.setattr(environment.sys, "flags", SimpleNamespace(hash_randomization=0))
    bare.setenv("PYTHONHASHSEED", found or "")
    if found is None:
        bare.delenv("PYTHONHASHSEED")
    for _ in range(2):
        environment.restart_interpreter()
    assert os.environ["PYTHONHASHSEED"] == "0"
    assert len(begun) == (says is not None)
    assert capsys.readouterr().out.startswith(says or "")


def test_an_interpreter_whose_hashing_cannot_be_fixed_is_refused(bare):
    """`python -I` ignores PYTHONHASHSEED, and a restart would not change that."""
    bare.setenv("PYTHONHASHSEED", "0")
    bare.setattr(environment.sys, "flags", SimpleNamespace(hash_randomization=1))
    with pytest.raises(UsageError, match="start Python without -E and -I"):
        environment.restart_interpreter()


@pytest.mark.parametrize("older", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_what_older_variables_of_malloc_set_stays(bare, tmp_path, older):
    """glibc passes over such a variable where GLIBC_TUNABLES has the same setting."""
    bare.setattr(environment, "LARGE_PAGES", tmp_path / "none")
    bare.setattr(environment.os, "execv", lambda *_words: None)
    bare.setattr(environment.sys, "flags", SimpleNamespace(hash_randomization=0))
    bare.setenv("PYTHONHASHSEED", "0")
    bare.setenv("GLIBC_TUNABLES", "")
    bare.setenv(older, "4096")
    environment.restart_interpreter()
    name = older.removeprefix("MALLOC_").strip("_").lower()
    assert os.environ["GLIBC_TUNABLES"] in environment.KEEP_FREED
    assert name not in os.environ["GLIBC_TUNABLES"]


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "PYTHONHASHSEED"])
def test_an_interpreter_that_is_started_without_its_settings_does_not_restart_for_ever(bare, tmp_path, name):
    """execv takes the variable away, as the C library does for a file with capabilities."""
    begun = []

    def execv(_path, words):
        begun.append(words)
        bare.delenv(name)
        bare.setattr(environment.sys, "_xoptions", {words[2]: True})
        environment.restart_interpreter()

    bare.setattr(environment, "LARGE_PAGES", tmp_path / "none")
    bare.setattr(environment.os, "execv", execv)
    bare.setattr(environment.sys, "flags", SimpleNamespace(hash_randomization=0))
    bare.setenv("GLIBC_TUNABLES", "")
    bare.setenv("PYTHONHASHSEED", "")
    with pytest.raises(UsageError, match="taken away") if name == "PYTHONHASHSEED" else nullcontext():
        environment.restart_interpreter()
    assert len(begun) == 1


SLURM = (
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURMD_NODENAME",
)


@pytest.fixture
def slurm(bare):
    """Sets Slurm's variables, of which none is left from a job that runs these tests."""

    def set_variables(**values):
        for name in SLURM:
            bare.delenv(name, raising=False)
        for name, value in values.items():
            bare.setenv(name, value)

    return set_variables


def test_outside_slurm_no_job_is_known(slurm):
    slurm()
    assert SlurmJob.read() is None


def test_a_job_outside_an_array_that_was_not_requeued_has_no_task_and_no_restart(slurm):
    slurm(SLURM_JOB_ID="7")
    assert SlurmJob.read() == SlurmJob(job="7", array_job=None, array_task=None, restarts=0, host="")


def test_numbers_of_slurm_that_are_none_are_unknown_and_refuse_nothing(slurm):
    slurm(SLURM_JOB_ID="7", SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="x", SLURM_RESTART_COUNT="-1")
    assert SlurmJob.read() == SlurmJob(job="7", array_job="6", array_task=None, restarts=None, host="")
