"""Jobs of Slurm are requeued where the run can go on, and say in its events which jobs they are.

`make slurm` plays the same on a real Slurm. Here its commands are scripts, so that each answer of
Slurm can be had.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from gates import PATIENCE_S, wait_for

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

    def __init__(self, folder, script, state="RUNNING", *, restarts=0, left="11:59:58", words=(), **user):
        """left: until the time limit. user: variables of the user's."""
        self.folder, self.script = folder, script
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
        words = ["bash", str(SCRIPTS / script), *(words or ["recipe.py", "--run-dir", "a folder"])]
        env = os.environ | variables | user | {"PATH": f"{folder}:{os.environ['PATH']}"}
        with (folder / "output").open("w") as out:
            files = {"cwd": folder, "stdout": out, "stderr": out}
            self.process = subprocess.Popen(words, env=env, start_new_session=True, **files)
        wait_for(lambda: self.calls() or self.process.poll() is not None, "the step to start")

    def calls(self):
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def output(self):
        return (self.folder / "output").read_text()

    def ends(self, code):
        """The exit code of the script, where its step ends with this one."""
        (self.folder / "code").write_text(str(code))
        return self.process.wait(PATIENCE_S)


@pytest.fixture(params=["array.sbatch", "nodes.sbatch"])
def start(tmp_path, request):
    jobs = []

    def start(*state, **how):
        jobs.append(Job(tmp_path, request.param, *state, **how))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


@pytest.mark.parametrize(
    ("code", "restarts", "state", "requeued"),
    [
        (75, 0, "RUNNING", ["array.sbatch", "nodes.sbatch"]),
        (75, 1000, "RUNNING", ["array.sbatch", "nodes.sbatch"]),
        (143, 0, "RUNNING", ["array.sbatch", "nodes.sbatch"]),  # SIGTERM before the agent had begun
        (0, 0, "RUNNING", []),
        (1, 0, "RUNNING", []),
        # An agent was killed: others may have gone on in the job of several nodes.
        (137, 9, "RUNNING", ["nodes.sbatch"]),
        (137, 10, "RUNNING", []),  # again and again, as with too little memory
        (75, 0, "COMPLETING", []),  # `scancel JOB` means that nothing follows
        (75, 0, "", []),  # the controller does not answer
    ],
)
def test_a_job_requeues_itself_only_where_its_run_can_go_on(start, code, restarts, state, requeued):
    job = start(state, restarts=restarts)

    assert job.ends(code) == code
    is_requeued = job.script in requeued
    agents, *others = job.calls()
    nodes = 3 if job.script == "array.sbatch" else 4
    assert agents.endswith(f"--max-nodes {nodes} --grace 20 recipe.py --run-dir a folder")
    assert others == [f"scontrol requeue {job.name}"] * is_requeued
    if code and not is_requeued:
        assert f"exit code {code}" in job.output()


def test_usr1_asks_all_agents_to_leave(start):
    """Slurm sends it before the time limit. Filters are for commands by hand and hide no job. It
    comes twice, then SIGTERM as to every process, and the script still returns the exit code of its
    step: the agents have their grace.
    """
    job = start(SQUEUE_USERS="another", SCANCEL_STATE="PENDING", SLURM_CLUSTERS="a,b")
    for count in (1, 2):
        job.process.send_signal(signal.SIGUSR1)
        wait_for(lambda count=count: len(job.calls()) == 1 + count, "scancel")

    job.process.send_signal(signal.SIGTERM)
    assert job.ends(75) == 75
    assert job.calls()[1:] == [f"scancel --signal=TERM {job.name}"] * 2 + [f"scontrol requeue {job.name}"]


@pytest.mark.parametrize(("left", "is_short"), [("4:59", True), ("5:00", False)])
def test_a_time_limit_that_leaves_no_time_to_train_is_said(start, left, is_short):
    job = start(left=left)
    if is_short:
        wait_for(lambda: f"the time limit is {left} away" in job.output(), "a line")
    job.ends(0)

    assert ("give a --time of ten minutes or more" in job.output()) is is_short


@pytest.mark.parametrize(
    ("words", "code"),
    [(["recipe.py", "--fresh", "--", "x"], 2), (["recipe.py", "--", "--fresh"], 0)],
)
def test_a_job_that_would_start_over_at_each_requeue_is_refused(start, words, code):
    """A word of the recipe may have that name."""
    job = start(words=words)
    assert job.ends(0) == code
    assert bool(job.calls()) is (code == 0)
    assert ("give another --run-dir, or move the old one away by hand" in job.output()) is (code == 2)
