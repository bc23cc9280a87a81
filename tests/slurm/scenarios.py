"""What Slurm does to jobs, and what has to follow; the first line of each docstring is its title.

A scenario returns when its jobs have ended as they have to, and raises RuntimeError or TimeoutError
where they do not.
"""

from collections.abc import Callable

from job_run import JobRun


def preempted(run: JobRun) -> None:
    """One of two tasks is preempted by a job of higher priority, and comes back"""
    run.shut(6, 12)
    job = run.submit("array.sbatch", "--array=0-1", "--partition=low")
    run.stands(6, ranks=2)
    over = run.folder / "over"
    wait = f"until [ -e '{over}' ]; do sleep 0.1; done"
    words = ("sbatch", "--parsable", "--partition=high", f"--output={run.folder}/high.out", "--wrap", wait)
    high = run.slurm.call(*words)
    run.jobs.append(high)
    run.happens("drain_requested", generation=1)
    run.open(6)
    run.stands(12, ranks=1)
    run.wait_for(lambda: run.slurm.state(high)["JobState"] == "RUNNING", "the job of higher priority")
    over.touch()
    run.ends(high)
    tasks = [f"{job}_0", f"{job}_1"]
    gone = run.wait_for(
        lambda: [task for task in tasks if run.slurm.state(task)["Restarts"] == "1"], "a task to be requeued"
    )
    run.is_requeued(gone[0])
    run.slurm.begin_now(gone[0])
    run.happens("drain_requested", generation=2)
    run.open(12)
    for task in tasks:
        run.ends(task)
    run.happens("generation_started", generation=3, world_size=2)


def time_limit(run: JobRun) -> None:
    """A job reaches its time limit; its user has filters for squeue and scancel"""
    run.shut(6)
    filters = {"SQUEUE_PARTITION": "low", "SQUEUE_STATES": "PENDING", "SCANCEL_PARTITION": "low"}
    job = run.submit("array.sbatch", "--array=0", "--time=60", "--signal=B:USR1@60", user=filters)
    run.stands(6, ranks=1)
    run.slurm.end_soon(f"{job}_0")
    run.happens("drain_requested")
    run.open(6)
    run.is_requeued(f"{job}_0")
    run.slurm.unlimit(f"{job}_0")
    run.slurm.begin_now(f"{job}_0")
    run.ends(f"{job}_0")


def cancelled(run: JobRun) -> None:
    """The whole array is cancelled, and submitted again"""
    run.shut(6)
    job = run.submit("array.sbatch", "--array=0-1")
    run.stands(6, ranks=2)
    run.slurm.call("scancel", job)
    run.happens("drain_requested", count=2)
    run.open(6)
    for task in (f"{job}_0", f"{job}_1"):
        run.ends(task, "CANCELLED")
    run.happens("run_interrupted", count=2, step=6)
    job = run.submit("array.sbatch", "--array=0-1")
    run.ends(f"{job}_0")
    run.ends(f"{job}_1")
    run.happens("generation_started", generation=2, world_size=2)


def several_nodes(run: JobRun) -> None:
    """One job of two nodes by srun is requeued"""
    run.shut(6)
    job = run.submit("nodes.sbatch", "--nodes=2")
    run.stands(6, ranks=2)
    run.slurm.call("scontrol", "requeue", job)
    run.happens("drain_requested", count=2)
    run.open(6)
    run.is_requeued(job)
    run.slurm.begin_now(job)
    run.ends(job)


def node_failed(run: JobRun) -> None:
    """A node of the job by srun fails, and the other one completes the run"""
    run.shut(6)
    job = run.submit("nodes.sbatch", "--nodes=2", options=("--snapshot-every", "1"))
    run.stands(6, ranks=2)
    first = run.slurm.state(job)["BatchHost"]
    failed = next(host for host in run.hosts() if host != first)
    run.slurm.call("scontrol", "update", f"nodename={failed}", "state=down", "reason=test")
    run.happens("generation_started", generation=2, world_size=1)
    run.open(6)
    run.is_requeued(job)
    run.slurm.begin_now(job)
    run.ends(job)
    if len(run.hosts()) != 2:
        raise RuntimeError(f"expected that a complete run starts no agent, found {run.hosts()}")


# Two of them are played at a time. Slurm looks at time limits twice a minute only.
SCENARIOS: tuple[Callable[[JobRun], None], ...] = (
    time_limit,
    preempted,
    cancelled,
    several_nodes,
    node_failed,
)
