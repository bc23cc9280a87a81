"""Tables and sentences for people, made of the values that `--json` prints; nothing is computed.

It does not promise a stable layout: scripts read the JSON.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic.observe.run_view import RunView, ScheduledNode
from elastic.observe.step_line import loss_words
from elastic.report.diff import ComparedRun, Difference
from elastic.report.facts import ended, plain_facts, report_facts, value_text
from elastic.report.runs import Runs
from elastic.report.verify import Verification
from elastic.system.untrusted import printable


def show(what: RenderableType) -> None:
    Console(highlight=False).print(what, soft_wrap=True)


def report_tables(name: str, view: RunView) -> RenderableType:
    parts: list[RenderableType] = [_facts(name, report_facts(view)), _generations(view)]
    if view.recoveries:
        columns: tuple[str, ...] = (
            "cause",
            "lost",
            "source",
            "detect",
            "rendezvous",
            "down",
            "restore",
            "first step",
            "total",
        )
        # Nine columns find room in 80 letters.
        rows: Iterable[tuple[object, ...]] = (astuple(each)[: len(columns)] for each in view.recoveries)
        title = "recoveries: lost steps, phases in seconds, total since the first fault"
        parts.append(_table(title, columns, rows, space=0))
    if view.divergences:
        columns = ("step", "node", "entry", "verdict")
        rows = map(astuple, view.divergences)
        parts.append(_table("steps after which the ranks' states differed: who was wrong", columns, rows))
    if view.scheduled:
        jobs = ((each.node, _job(each), each.restarts, each.host) for each in view.scheduled)
        parts.append(_table("nodes that Slurm started", ("node", "job", "requeued", "host"), jobs))
    return Group(*parts)


def status_tables(name: str, view: RunView) -> RenderableType:
    saved = view.checkpoints.newest
    workers = f"world size {view.world_size}" if view.workers else "no workers"
    rows = {
        "state": ended(view.state, view.stopped),
        "step": f"{view.newest.step if view.newest else 0} of {view.length or 'an unknown number'}",
        "generation": f"{view.generation}, {workers}",
        "last checkpoint": f"step {saved.step}, {max(0.0, view.now_s - saved.time):.0f} s ago"
        if saved
        else "none",
    }
    if view.plain is not None:
        rows = {name: rows[name] for name in ("state", "generation")} | plain_facts(view.plain)
    facts = _facts(name, rows)
    if not view.workers:
        return facts
    return Group(facts, _table("workers", ("rank", "node", "pid"), map(astuple, view.workers)))


def diff_text(diff: Difference) -> RenderableType:
    lines = [diff.reason, _compared("A", diff.a), _compared("B", diff.b)]
    if diff.settings and not diff.same:
        found = (f"{each.setting}: {each.a} in A, {each.b} in B" for each in diff.settings)
        lines.append(f"they were begun with other settings: {'; '.join(found)}")
    return _cell("\n".join(lines))


def verify_text(name: str, found: Verification) -> RenderableType:
    if found.damage:
        damage = (f"  step {each.step}: {each.reason}" for each in found.damage)
        return _cell("\n".join([f"{name}: damaged", *damage]))
    if not found.committed:
        return Text(f"{name}: no checkpoint was committed yet")
    steps = ", ".join(map(str, found.committed))
    return Text(f"{name}: no damage; every checkpoint is as it was committed (steps {steps})")


def _job(node: ScheduledNode) -> str:
    """As `squeue` shows it: 12, or 12_3 for task 3 of the array 12."""
    return node.job if node.array_job is None else f"{node.array_job}_{value_text(node.array_task)}"


def runs_table(found: Runs) -> RenderableType:
    columns = ("run", "state", "step", "of", "loss", "newest step", "size", "")
    rows = (
        (
            each.name,
            each.state,
            each.step,
            each.steps,
            loss_words(each.loss) if each.step else None,
            None if each.age_s is None else f"{_duration(each.age_s)} ago",
            None if each.size_bytes is None else _size(each.size_bytes),
            each.reason or "",
        )
        for each in found.runs
    )
    parts: list[RenderableType] = [
        _table(printable(found.folder), columns, rows)
        if found.runs
        else _cell(f"{found.folder}: no runs were found")
    ]
    parts += [_cell(f"not looked into: {each.name} ({each.reason})") for each in found.unread]
    return Group(*parts)


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


def _compared(name: str, run: ComparedRun) -> str:
    end = f"finished, digest {value_text(run.final_digest)}" if run.finished else "not finished"
    return f"{name}: {run.steps} steps, {end}"


def _facts(name: str, facts: Mapping[str, str]) -> Group:
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in facts.items():
        table.add_row(label, _cell(value))
    return Group(Text(printable(name), style="bold"), table)


def _generations(view: RunView) -> Table:
    """The steps of a plain script are its own."""
    names = ["generation", "cause", "world_size", "nodes"]
    names += [] if view.plain else ["first_step", "last_step"]
    rows = (
        tuple(", ".join(each.nodes) if name == "nodes" else getattr(each, name) for name in names)
        for each in view.generations
    )
    return _table("generations", [name.replace("_", " ") for name in names], rows)


def _table(
    title: str, columns: Iterable[str], rows: Iterable[tuple[object, ...]], *, space: int = 1
) -> Table:
    """space: behind each column, beside the dividing space."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, space, 0, 0)
    )
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_cell(value_text(value)) for value in row))
    return table


def _cell(text: str) -> Text:
    """Escaped, without markup: every node writes events, and none may command this terminal."""
    return Text(printable(text))
