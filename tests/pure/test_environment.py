"""The launcher's variables become one value, or an error that names the malformed variable; and
every interpreter of a run begins with the same settings.
"""

import os
import signal
from dataclasses import replace

import pytest

from elastic.config import environment
from elastic.config.durations import Every
from elastic.config.environment import AGENT, PREFLIGHT, RUN_DIR, AgentLink
from elastic.config.identity import Origin
from elastic.config.options import ListenAddress, Options
from elastic.divergence import Divergence
from elastic.errors import UsageError
from elastic.events import NodeScheduled

NUMBERS = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
OF_MALLOC = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
DIVERGENCE = Divergence(generation=2, step=9, agreed=8, entry="m.w", votes=(1, 2), nodes=("a", "b"))
LINK = AgentLink(
    pid=7,
    node="a",
    generation=3,
    control_page="/proc/7/fd/3",
    uploader="/run/socket",
    options=Options(
        recipe="r.py",
        run_dir="runs/\udcff",
        from_=Origin.parse("runs/a@3:m"),
        save_every=Every.parse("10min"),
        drain_signals=(signal.SIGUSR1,),
        notice="aws",
        http=ListenAddress.parse("localhost:0"),
        faults="step 1 rank 0: kill",
        accept=True,
    ),
    memory="",
    divergence=DIVERGENCE,
    error_folder="/run/errors",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """An environment without a launcher, and without the settings that other tests pinned."""
    for name in [*NUMBERS, "MASTER_ADDR", AGENT, PREFLIGHT, RUN_DIR, *SETTINGS, *OF_MALLOC]:
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what a test sets
        monkeypatch.delenv(name)
    return monkeypatch


def test_torchrun_gives_ranks_and_without_it_there_is_one(bare):
    """All four numbers differ, so that a swap shows."""

    def seen():
        place, launch = environment.read_assignment(), environment.read()
        return place.rank, place.world_size, launch.local_rank, launch.local_world_size, place.master

    assert seen() == (0, 1, 0, 1, None)
    for name, value in NUMBERS.items():
        bare.setenv(name, value)
    bare.setenv("MASTER_ADDR", "localhost")
    assert seen() == (5, 8, 1, 4, ("localhost", 0))
    bare.setenv(PREFLIGHT, "/tmp/answer")  # of an agent that torchrun started: it never joins a group
    assert seen() == (0, 1, 0, 1, None)


def test_the_link_to_the_agent_survives_the_environment(bare):
    """Values with spaces and quotes among them."""
    for name, value in LINK.to_env().items():
        bare.setenv(name, value)
    bare.setenv(RUN_DIR, "runs/other")
    assert environment.read_assignment().agent == LINK
    assert environment.read().run_dir == "runs/other"


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["", "-1", "1.5"])
def test_a_variable_that_is_not_a_number_is_named(bare, name, value):
    """A mistake in a batch script."""
    bare.setenv(name, value)
    with pytest.raises(UsageError, match=rf"variable {name}, found {value!r}"):
        environment.read(), environment.read_assignment()


def test_slurm_says_which_job_started_a_process():
    """Numbers that are none are unknown, and refuse nothing."""
    job = NodeScheduled(scheduler="slurm", job="7")
    values = {"SLURM_JOB_ID": "7"}
    assert (NodeScheduled.by_slurm({}), NodeScheduled.by_slurm(values)) == (None, job)
    values |= {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "x", "SLURM_RESTART_COUNT": "-1"}
    assert NodeScheduled.by_slurm(values) == replace(job, array_job="6", restarts=None)


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


@pytest.mark.parametrize("name", ["", *OF_MALLOC])
def test_malloc_works_as_the_environment_says(bare, name):
    """glibc passes over the older variables where GLIBC_TUNABLES is set."""
    if name:
        bare.setenv(name, "4096")
    environment.set_up_malloc()
    expected = {"": environment.MALLOC, "GLIBC_TUNABLES": "4096"}.get(name)
    assert os.environ.get("GLIBC_TUNABLES") == expected
