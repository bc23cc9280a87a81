"""Tables and sentences for people, made of the same values that `--json` prints; nothing is computed here.

It does not promise a stable layout: scripts read the JSON.
"""

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic.system.untrusted import printable

Record = dict[str, Any]


def report_tables(name: str, report: Record) -> RenderableType:
    parts: list[RenderableType] = [_facts(name, _report_facts(report)), _generations(report["generations"])]
    if report["recoveries"]:
        parts.append(_recoveries(report["recoveries"]))
    return Group(*parts)


def _snapshots(chosen: Record | None) -> str:
    if chosen is None:
        return "as asked for"
    return f"every {chosen['every']} steps, chosen because one costs {chosen['cost_s'] * 1000:.1f} ms of a step of {chosen['step_s'] * 1000:.0f} ms"


def status_tables(name: str, status: Record) -> RenderableType:
    saved = status["last_checkpoint"]
    facts = _facts(
        name,
        {
            "state": status["state"],
            "step": f"{status['step']} of {_known(status['steps'])}",
            "generation": f"{status['generation']}, world size {status['world_size']}",
            "last checkpoint": f"step {saved['step']}, {saved['age_s']:.0f} s ago" if saved else "none",
        },
    )
    if not status["workers"]:
        return facts
    table = _table("workers", "rank", "node", "pid")
    for worker in status["workers"]:
        table.add_row(*map(_cell, (worker["rank"], worker["node"], worker["pid"])))
    return Group(facts, table)


def diff_text(diff: Record) -> RenderableType:
    lines = [diff["reason"]]
    for name in ("a", "b"):
        run = diff[name]
        end = f"finished, digest {run['final_digest']}" if run["finished"] else "not finished"
        lines.append(f"{name.upper()}: {run['steps']} steps, {end}")
    return _cell("\n".join(lines))


def verify_text(name: str, found: Record) -> RenderableType:
    steps, damage = found["committed"], found["damage"]
    if damage:
        return _cell(
            "\n".join([f"{name}: damaged", *(f"  step {item['step']}: {item['reason']}" for item in damage)])
        )
    if not steps:
        return Text(f"{name}: no checkpoint was committed yet")
    return Text(
        f"{name}: no damage; every checkpoint is as it was committed (steps {', '.join(map(str, steps))})"
    )


def _report_facts(report: Record) -> Record:
    step_time, checkpoints = report["step_time_s"], report["checkpoints"]
    return {
        "finished": "yes" if report["finished"] else "no",
        "steps": f"{report['steps']}, {report['epochs']} epochs",
        "lost steps": str(report["lost_steps"]),
        "goodput": "unknown" if report["goodput"] is None else f"{report['goodput']:.1%}",
        "step time": f"median {_seconds(step_time['median'])}, p99 {_seconds(step_time['p99'])}",
        "checkpoints": f"{checkpoints['committed']} committed, {checkpoints['failed']} failed",
        "snapshots": _snapshots(report["snapshots"]),
        "final digest": _known(report["final_digest"]),
    }


def _facts(name: str, facts: Record) -> Group:
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in facts.items():
        table.add_row(label, _cell(value))
    return Group(Text(printable(name), style="bold"), table)


def _generations(generations: list[Record]) -> Table:
    table = _table("generations", "generation", "cause", "world size", "nodes", "first step", "last step")
    for g in generations:
        nodes = ", ".join(str(node) for node in g["nodes"])
        steps = (_known(g["first_step"]), _known(g["last_step"]))
        table.add_row(*map(_cell, (g["generation"], g["cause"], g["world_size"], nodes, *steps)))
    return table


def _recoveries(recoveries: list[Record]) -> Table:
    phases = ("detect_s", "rendezvous_s", "restore_s", "first_step_s", "total_s")
    words = [phase.removesuffix("_s").replace("_", " ") for phase in phases]
    table = _table("recoveries: lost steps, phases in seconds", "cause", "lost", "source", *words)
    for r in recoveries:
        found = (r["cause"], r["lost_steps"], _known(r["source"]), *(_number(r[phase]) for phase in phases))
        table.add_row(*map(_cell, found))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in columns:
        table.add_column(column)
    return table


def _cell(value: Any) -> Text:
    """Events are written by every node: what they say is shown, and neither rich nor the terminal takes it for an instruction."""
    return Text(printable(str(value)))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _known(value: Any) -> str:
    return "-" if value is None else str(value)
