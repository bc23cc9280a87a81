"""Two runs are compared as their files are now, each line read once and none kept."""

from contextlib import closing

from elastic.config.run_dir import RunDir
from elastic.observe.log import read_events
from elastic.observe.step_reader import StepReader
from elastic.report.begun_with import begun_with
from elastic.report.chains import StepChains
from elastic.report.diff import ComparedRun, Difference, compare, compared_run


def compare_runs(a: RunDir, b: RunDir) -> Difference:
    """Raises OSError."""
    return compare(*_read(a), *_read(b), (begun_with(a), begun_with(b)))


def _read(run: RunDir) -> tuple[ComparedRun, StepChains]:
    # Events first: the steps that they tell of are in the metrics by then.
    events, chains = read_events(run.events), StepChains()
    with closing(StepReader(run.metrics)) as reader:
        for batch in reader.batches():
            if batch is not None:
                chains.add(batch)
    return compared_run(events, chains), chains
