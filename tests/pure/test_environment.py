"""The launcher's variables become one value, or an error that names the malformed variable."""

import signal

import pytest

from elastic.config import environment
from elastic.config.durations import Every
from elastic.config.environment import AGENT, PREFLIGHT, RUN_DIR, AgentLink, SlurmJob
from elastic.config.listen_address import ListenAddress
from elastic.config.options import Options
from elastic.config.parent import Origin
from elastic.divergence import Divergence
from elastic.errors import UsageError

NUMBERS = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
DIVERGENCE = Divergence(generation=2, step=9, agreed=8, entry="m.w", votes=(1, 2), nodes=("a", "b"))
LINK = AgentLink(
    pid=7,
    node="a",
    run_dir='runs/x "y"',
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
    failures=0,
    divergence=DIVERGENCE,
    error_folder="/run/errors",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """An environment without a launcher."""
    for name in [*NUMBERS, "MASTER_ADDR", AGENT, PREFLIGHT, RUN_DIR]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_the_world_size_is_one():
    """The script was started by plain python."""
    launch = environment.read()
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (0, 1, 0, 1)
    assert launch.agent is launch.preflight is launch.run_dir is None
    assert launch.master is None


def test_the_variables_of_torchrun_give_ranks_and_world_sizes(bare):
    """All four numbers differ, so that a swap shows."""
    for name, value in NUMBERS.items():
        bare.setenv(name, value)
    bare.setenv("MASTER_ADDR", "localhost")
    launch = environment.read()
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (5, 8, 1, 4)
    assert launch.master is not None


def test_a_preflight_never_joins_a_group(bare):
    """torchrun started the agent, whose preflight inherits MASTER_ADDR."""
    bare.setenv("MASTER_ADDR", "localhost")
    bare.setenv(PREFLIGHT, "/tmp/answer")
    assert environment.read().master is None


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
