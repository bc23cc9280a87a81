"""Any bytes in the place of a record give a usable record or the documented error, and no other."""

import io
import json
import tempfile
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from hostile import json_values, junk, spoiled, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import example
from payloads import hashes_of
from rich.console import Console
from viewed import viewed

from elastic import events
from elastic.agent.exit_report import report_exit
from elastic.checkpoint import record as commit_record
from elastic.config import environment, identity
from elastic.config.run_dir import RunDir
from elastic.errors import CheckpointDamaged, UsageError
from elastic.observe import logged_event, metrics
from elastic.observe.console import progress_line
from elastic.observe.log import read_events
from elastic.observe.step_columns import StepBatch
from elastic.rendezvous import membership, transitions
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.backends.etcd import _answer
from elastic.rendezvous.backends.host import Answer, Question
from elastic.rendezvous.failure_detector import NO_HEARTBEAT
from elastic.rendezvous.group import ANY_RUN, Group, GroupDamaged, Node, RunEnd, SharedSettings, WorkerFailure
from elastic.rendezvous.heartbeat import counter_of
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.transitions import Timing
from elastic.report.diff import ComparedRun, StepChains, compare
from elastic.report.figures import report_json, status_json
from elastic.report.tables import cell, report_tables, status_tables
from elastic.snapshot import safetensors_header
from elastic.system import untrusted
from elastic.system.untrusted import printable
from elastic.uploader.protocol import Offer

NUMBERS = {"step": 1, "generation": 1, "slot": 0, "seq": 2, "size_bytes": 9}
OFFER = NUMBERS | {"resumed_from": None, "is_final": False}
POLICY = GroupPolicy(min_nodes=1, max_nodes=4, last_call_s=0.0, timeout_s=60.0)
NOW = Timing(now_s=100.0, closed_since_s=1.0, enough_since_s=1.0)
ME = Node(id="me", address="127.0.0.1", nproc=1)
SETTINGS = SharedSettings(run=ANY_RUN, min_nodes=1, max_nodes=4, keep_alive_s=2.0)


def group():
    empty, other = Group(settings=SETTINGS), Node(id="a", address="h", nproc=2)
    waiting = transitions.join(transitions.join(empty, other), ME)
    opened = transitions.form(waiting, alive={"a", "me"}, endpoint="h:1", policy=POLICY)
    failure = WorkerFailure(node="a", rank=0, message="m", traceback="t")
    how = {"cause": transitions.FAILURE, "step": 2, "counts": True, "failure": failure}
    return transitions.close(opened, generation=1, **how)


def decode(data):
    hashes_of(safetensors_header.LENGTH.pack(len(data)) + data)


def agent_link(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment.os, "environ", {environment.AGENT: text})
        return environment._decode(environment.AgentLink, environment.AGENT)


READERS = {
    "run.json": (identity.parse, UsageError),
    "COMMIT.json": (commit_record.parse, CheckpointDamaged),
    "payload": (hashes_of, CheckpointDamaged),
    "payload's header": (decode, CheckpointDamaged),
    "group": (Group.parse, GroupDamaged),
    "uploader's socket": (lambda data: untrusted.decode(Offer, data, what="offer"), ValueError),
    "c10d, to its host": (lambda data: untrusted.decode(Question, data, what="question"), ValueError),
    "c10d, to a node": (lambda data: untrusted.decode(Answer, data, what="answer"), ValueError),
    "ELASTIC_AGENT": (lambda data: agent_link(data.decode(errors="replace")), UsageError),
    "etcd": (lambda data: _answer("u", 200, data), BackendFailed),
}


@pytest.mark.parametrize("reader", READERS)
@given(junk)
def test_any_bytes_give_a_value_or_the_documented_error(reader, data):
    """Noise, JSON of any shape, deep nesting, a number of a million digits, no text, a pickle."""
    read, documented = READERS[reader]
    said = ""
    try:
        read(data)
    except documented as error:
        said = str(error)
    assert len(said) < 500


@settings(max_examples=300)
@given(spoiled(json.loads(group().to_json())))
def test_a_corrupted_group_is_refused_or_can_be_decided_about(record):
    """Of a foreign group that parses, an agent can ask every question."""
    try:
        found = Group.parse(json.dumps(record).encode())
    except GroupDamaged:
        return
    alive = found.member_ids | found.waiting_ids | {"me"}
    transitions.next_action(found, ME, alive=alive, timing=NOW, policy=POLICY)
    membership.lost_members(found, alive={"me"})
    membership.newcomers(found, alive=alive, policy=POLICY)
    for changed in (
        transitions.evict(found, alive={"me"}),
        transitions.leave(found, "me"),
        transitions.join(transitions.leave(found, "me"), ME),
    ):
        assert Group.parse(changed.to_json()) == changed


@given(spoiled(OFFER))
def test_a_corrupted_offer_is_refused_or_within_its_bounds(message):
    """Every number of an offer becomes a place in memory or a field of a commit record."""
    with suppress(ValueError):
        offer = asdict(untrusted.decode(Offer, message, what="offer"))
        assert isinstance(offer.pop("is_final"), bool)
        assert all(value is None or 0 <= value < 10**12 for value in offer.values())


@given(junk)
def test_any_bytes_in_rendezvous_files_are_numbers_or_failures(data):
    """State and heartbeats, whose texts may be anything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "beats").mkdir()
        for file in ("state-000000000001.json", "beats/x", "state-²", "state-", "beats/\udcff"):
            (folder / file).write_bytes(data)
        backend = DirectoryBackend(folder)
        with suppress(BackendFailed):
            assert backend.read() == (1, data)
        assert all(counter_of(text) >= NO_HEARTBEAT for text in backend.shown().values())


words = texts | st.just("[/red]\x1b]0;x\x07")  # for a terminal and for rich
RIGHT = {
    int: st.integers(-2, 9) | st.integers(-(10**30), 10**30),
    float: st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 9),
    str: words,
    bool: st.booleans(),
    list[str]: st.lists(words, max_size=3),
    dict[str, str]: st.dictionaries(words, words, max_size=3),
    list[int]: st.lists(st.integers(0, 9), max_size=3),
    list[list[int]]: st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
    float | None: st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.just(10**400),
    int | None: st.none() | st.integers(-2, 9),
    str | None: st.none() | words,
}


@st.composite
def logged(draw):
    """An event whose fields mostly have the right type, and sometimes hold anything."""
    name = draw(st.sampled_from(sorted(events.KINDS)))
    kinds = logged_event.HEAD | {each.name: each.type for each in fields(events.KINDS[name])}
    record = {field: draw(RIGHT[kind]) for field, kind in kinds.items()}
    record |= {"event": name, "generation": draw(st.integers(0, 3)), "time": draw(st.floats(0, 99))}
    return draw(spoiled(record)) if draw(st.integers(0, 3)) == 0 else record


OF_A_STEP = {
    "seconds": st.floats() | json_values,
    "time": st.floats(0, 99) | json_values,
    "generation": st.integers(0, 3) | json_values,
} | dict.fromkeys(("loss", "chain", "world_size"), json_values)
steps = st.fixed_dictionaries({"step": st.integers(0, 9) | json_values}, optional=OF_A_STEP)


def is_harmless(text):
    return all(each.isprintable() or each in "\n\t" for each in text)


def shown(thing):
    out = io.StringIO()
    Console(file=out, highlight=False, force_terminal=False, width=200).print(thing, soft_wrap=True)
    return out.getvalue()


@given(st.lists(logged(), min_size=2, max_size=6), st.lists(steps, max_size=4), st.lists(junk, max_size=2))
def test_any_events_are_reported_without_control_characters(logs, lines, noise):
    """Another node, or a stranger, wrote them: report, status and diff must still work."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, records in (("n.jsonl", logs), ("metrics", lines)):
            text = b"\n".join([*(json.dumps(each).encode() for each in records), *noise, b""])
            (folder / file).write_bytes(text)
        found, counted = read_events(folder), metrics.read(folder / "metrics")
        newest = metrics.newest(folder / "metrics")
    view = viewed(found, counted, newest=newest, beats={"n": 1.0}, now=100.0)
    chains = StepChains()
    chains.add(StepBatch(lines=counted))
    end = ComparedRun.of(found, chains)
    difference = compare(end, chains, end, chains)
    json.dumps([report_json(view), status_json(view), difference], default=asdict)
    tables = [report_tables("run", view), status_tables("run", view), cell(difference.text())]
    for text in (*map(shown, tables), "" if newest is None else printable(progress_line(newest, None))):
        assert is_harmless(text) and "\t" not in text


def test_every_event_that_the_log_writes_is_read_back():
    """Each kind goes through its JSON: the reader must not refuse its own writer."""
    for name, kind in events.KINDS.items():
        event = kind(**{each.name: example(each.type) for each in fields(kind)})
        head = {"event": event.name, "time": 1.5, "node": "n", "generation": 1}
        record = json.loads(json.dumps(head | event.fields()))
        found = logged_event.parse(record)
        assert event.name == name
        assert (found.event, found.to_json()) == (event, record)
        for field in fields(kind):
            with pytest.raises(ValueError, match="expected an event"):
                logged_event.parse(record | {field.name: {"": 0}})


@given(st.text())
def test_printable_text_is_unchanged(text):
    """Everything else is escaped, and the number of lines stays the same."""
    said = printable(text)
    assert is_harmless(said)
    assert said == text or not is_harmless(text)
    assert said.count("\n") == text.count("\n")


def test_a_traceback_from_another_node_is_escaped(tmp_path, capsys):
    """It arrives through the rendezvous and is printed last."""
    failure = WorkerFailure(node="a\x07", rank=0, message="m", traceback="line 1\nValueError: \x1b]0;x\x07")
    agent = SimpleNamespace(failure=failure, end=RunEnd(exit_code=1, reason="\x1b[2J"))
    options = SimpleNamespace(recipe="exact.py")
    settings = SimpleNamespace(imports_library=False, run=RunDir.parse(str(tmp_path)), options=options)
    report_exit(agent, SimpleNamespace(settings=settings, log=SimpleNamespace(record=lambda _event: None)))
    said = capsys.readouterr().err
    assert "ValueError" in said and is_harmless(said)
