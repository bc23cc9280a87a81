"""Jobs of Slurm are requeued where the run can go on, and say in its events which jobs they are.

`make slurm` plays the same on a real Slurm. Here its commands are scripts, so that each answer of
Slurm can be had.
"""

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from packages import PACKAGES, NoSlurm, unpack
from slurm import wait_for

from elastic.cli import main

pytestmark = pytest.mark.process

PATIENCE_S = 120.0
SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"
COMMANDS = {
    # The step stands until the test writes its exit code.
    "srun": 'echo "srun $*" >> calls; until [ -s code ]; do sleep 0.02; done; exit "$(cat code)"',
    "scancel": '[[ -n $SCANCEL_PARTITION$SCANCEL_STATE ]] || echo "scancel $*" >> calls',
    "scontrol": 'echo "scontrol $*" >> calls',
    # One line for each task of the array, where its number is given; none where the user filters.
    "squeue": """
if [[ -n $SQUEUE_PARTITION$SQUEUE_STATES$SQUEUE_USERS$SLURM_CLUSTERS ]]; then exit 0; fi
if [[ "$*" == *=%L ]]; then cat left; exit; fi
cat state; if [[ "$*" == *--jobs=7\\ * && -n $SLURM_ARRAY_JOB_ID ]]; then cat state; fi""",
}


class Job:
    """A batch script of deploy/slurm, with the commands above on its PATH."""

    def __init__(
        self, folder: Path, script: str, state: str, restarts: int, left: str, user: Mapping[str, str]
    ) -> None:
        """left: until the time limit. user: variables of the user's."""
        self.folder = folder
        for name, text in COMMANDS.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        (folder / "state").write_text(state)
        (folder / "left").write_text(left)
        self.name = "7" if script == "nodes.sbatch" else "7_2"
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}
        if restarts:  # Slurm sets it from the first requeue on
            variables["SLURM_RESTART_COUNT"] = str(restarts)
        if script == "array.sbatch":  # the last of three tasks: its number is that of the array
            task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
            variables |= task
        words = ["bash", str(SCRIPTS / script), "recipe.py", "--run-dir", "a folder"]
        env = os.environ | variables | dict(user) | {"PATH": f"{folder}:{os.environ['PATH']}"}
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(words, cwd=folder, env=env, start_new_session=True, stdout=output)
        wait_for(self.calls, "the step to start", PATIENCE_S)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def ends(self, code: int) -> int:
        """The exit code of the script, where its step ends with this one."""
        (self.folder / "code").write_text(str(code))
        return self.process.wait(PATIENCE_S)


@pytest.fixture(params=["array.sbatch", "nodes.sbatch"])
def start(tmp_path, request):
    jobs = []

    def start(state="RUNNING", restarts=0, left="11:59:58", **user):
        jobs.append(Job(tmp_path, request.param, state, restarts, left, user))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


@pytest.mark.parametrize("code", [75, 143])
def test_a_job_whose_node_left_has_itself_requeued(start, code):
    """75: its state is saved. 143: SIGTERM came before the agent had begun."""
    job = start()

    assert job.ends(code) == code
    assert job.calls()[1:] == [f"scontrol requeue {job.name}"]


@pytest.mark.parametrize("code", [0, 1, 2, 76])
def test_a_job_that_is_complete_or_failed_is_not_requeued(start, code):
    job = start()

    assert job.ends(code) == code
    assert job.calls()[1:] == []
    assert (f"exit code {code}: job {job.name} does not requeue itself" in job.output()) is (code != 0)


def test_a_killed_agent_is_started_again_only_where_others_may_have_gone_on_in_its_job(start):
    """The highest code of all agents is that of the job of several nodes."""
    job = start()

    assert job.ends(137) == 137
    assert job.calls()[1:] == (["scontrol requeue 7"] if job.name == "7" else [])


@pytest.mark.parametrize(("restarts", "requeues"), [(9, True), (10, False), (11, False)])
def test_a_job_whose_agents_are_killed_again_and_again_gives_up_with_a_sentence(start, restarts, requeues):
    """Too little memory kills an agent of each start. An array's task is not requeued at all."""
    job = start(restarts=restarts)

    assert job.ends(137) == 137
    requeues = requeues and job.name == "7"
    assert job.calls()[1:] == (["scontrol requeue 7"] if requeues else [])
    gives_up = f"requeued {restarts} times, 10 or more: it is not requeued again" in job.output()
    assert gives_up is (job.name == "7" and not requeues)


def test_a_job_that_left_often_is_requeued_all_the_same(start):
    job = start(restarts=1000)

    assert job.ends(75) == 75
    assert job.calls()[1:] == [f"scontrol requeue {job.name}"]


@pytest.mark.parametrize("state", ["COMPLETING", ""])
def test_a_job_that_slurm_requeues_or_cancels_itself_is_not_requeued(start, state):
    """`scancel JOB` means that nothing follows. Where the controller does not answer, RequeueExit
    is left.
    """
    job = start(state)

    assert job.ends(75) == 75
    assert job.calls()[1:] == []
    assert f"because squeue says {state or 'nothing'} in place of RUNNING." in job.output()
    assert f"scontrol requeue {job.name}" in job.output()


def test_a_requeue_that_slurm_refuses_is_said(start):
    job = start()
    (job.folder / "scontrol").write_text("#!/bin/bash\nexit 1\n")

    assert job.ends(75) == 75
    assert f"exit code 75: job {job.name} is not requeued, as scontrol says above" in job.output()


FILTERS = {
    "SQUEUE_PARTITION": "debug",
    "SQUEUE_STATES": "PENDING",
    "SQUEUE_USERS": "another",
    "SCANCEL_PARTITION": "debug",
    "SCANCEL_STATE": "PENDING",
    "SLURM_CLUSTERS": "a,b",
}


@pytest.mark.parametrize("variable", FILTERS)
def test_a_filter_that_the_user_has_for_commands_by_hand_hides_no_job_from_its_script(start, variable):
    job = start(**{variable: FILTERS[variable]})
    job.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: len(job.calls()) == 2, "scancel", PATIENCE_S)

    assert job.ends(75) == 75
    assert job.calls()[1:] == [f"scancel --signal=TERM {job.name}", f"scontrol requeue {job.name}"]


@pytest.mark.parametrize(("left", "is_short"), [("1:57", True), ("4:59", True), ("5:00", False)])
def test_a_time_limit_that_leaves_no_time_to_train_is_said(start, left, is_short):
    job = start(left=left)
    if is_short:
        wait_for(lambda: f"the time limit is {left} away" in job.output(), "a line", PATIENCE_S)
    job.ends(0)

    assert ("give a --time of ten minutes or more" in job.output()) is is_short


@pytest.mark.parametrize("script", ["array.sbatch", "nodes.sbatch"])
@pytest.mark.parametrize(
    ("words", "variable", "is_refused"),
    [
        (["recipe.py", "--fresh", "--", "x"], "", True),
        (["--fresh", "recipe.py"], "0", True),
        (["recipe.py"], "1", True),
        (["recipe.py", "--", "--fresh"], "", False),
        (["recipe.py"], "0", False),
    ],
)
def test_a_job_that_would_start_over_at_each_requeue_is_refused_before_anything_starts(
    tmp_path, script, words, variable, is_refused
):
    """Also by the variable. A word of the recipe may have that name."""
    (tmp_path / "srun").write_text("#!/bin/bash\ntouch started\n")
    (tmp_path / "squeue").write_text("#!/bin/bash\n")
    for name in ("srun", "squeue"):
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ELASTIC_FRESH": variable}
    command = ["bash", str(SCRIPTS / script), *words]
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert found.returncode == (2 if is_refused else 0)
    assert (tmp_path / "started").exists() is not is_refused
    assert ("give another --run-dir, or move the old one away by hand" in found.stderr) is is_refused


def test_usr1_before_the_time_limit_asks_all_agents_of_the_job_to_leave(start):
    """Twice, and the script still returns the exit code of its step."""
    job = start()
    for count in (1, 2):
        job.process.send_signal(signal.SIGUSR1)
        wait_for(lambda count=count: len(job.calls()) == 1 + count, "scancel", PATIENCE_S)

    assert job.ends(75) == 75
    assert job.calls()[1:] == [f"scancel --signal=TERM {job.name}"] * 2 + [f"scontrol requeue {job.name}"]


def test_sigterm_to_the_script_leaves_the_agents_their_grace(start):
    """As Slurm sends it to every process of a job that it ends."""
    job = start("COMPLETING")
    job.process.send_signal(signal.SIGTERM)

    assert job.ends(75) == 75


def test_the_words_behind_the_script_reach_each_agent_as_they_are(start):
    job = start()
    job.ends(0)

    assert job.calls()[0].endswith(
        (
            "--max-nodes 3 --grace 20 recipe.py --run-dir a folder",
            "--max-nodes 4 --grace 20 recipe.py --run-dir a folder",
        )
    )


def test_a_node_says_which_job_of_slurm_started_it(drill, capsys):
    variables = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    variables |= {"SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "gpu-7"}
    drill.start(env=variables).ends_with(0)

    assert drill.values("node_scheduled", "job", "array_task", "restarts", "host") == [("14", 3, 2, "gpu-7")]
    main(["report", drill.run.url])
    assert "12_3" in capsys.readouterr().out


def test_where_the_packages_of_slurm_cannot_be_had_one_sentence_says_so(tmp_path, monkeypatch):
    """As on a machine without apt, and with one that reaches no server."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        NoSlurm, match=r"expected `apt-get download` .* found: .*apt-get.*; run this on Debian"
    ):
        unpack(tmp_path / "first")

    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho first >&2\necho 'E: no server' >&2\nexit 100\n")
    apt.chmod(0o755)
    with pytest.raises(NoSlurm, match=rf"{PACKAGES[-1]}, found: E: no server; run this on Debian"):
        unpack(tmp_path / "second")
