"""Parts of many nodes become one file of metrics: each step once, whatever was lost or replayed."""

from hypothesis import given
from hypothesis import strategies as st
from logged import logged

from elastic.observe import log_shipper, upload_parts
from elastic.observe.step_line import StepLine


def line(generation, step, **more):
    return StepLine(step=step, generation=generation, values=more)


@given(st.data())
def test_any_history_gives_the_lines_of_one_file(data):
    """The dumb twin is the file itself, rewound at each restore. Nodes upload each line once or
    twice. Of a node that was lost before it had uploaded its restored event, the first line says
    where it began.
    """
    file, uploaded, restored, dropped = [], [], {}, {}
    for generation in range(1, data.draw(st.integers(1, 5)) + 1):
        at = data.draw(st.integers(0, len(file)))
        restored[generation], dropped[generation] = at, len(file) - at
        file = file[:at]
        count = data.draw(st.integers(0, 5))
        if count and data.draw(st.booleans()):
            del restored[generation]
        for step in range(at + 1, at + 1 + count):
            file.append(line(generation, step))
            uploaded += [file[-1]] * data.draw(st.integers(1, 2))
    assert upload_parts.merge(data.draw(st.permutations(uploaded)), restored) == (file, dropped)


def test_a_restored_event_gets_lost_steps_of_other_nodes():
    """The new rank 0 had no lines of the generation before. A step that was done again for a
    comparison is not lost; other events stay as they are.
    """
    compared = [
        logged("rehearsed", 4.0, 4, step=4, seconds=1.0, verdict="alike"),
        logged("overlapped", 5.0, 5, step=4, seconds=1.0, verdict="alike"),
        logged("step_differed", 6.0, 6, step=4, entries=["the loss"], verdict="random", accepted=True),
    ]
    counts = {1: 0, 2: 0, 3: 4, 4: 0, 5: 0, 6: 0}
    events = [logged("restored", number, number, step=3, lost_steps=at) for number, at in counts.items()]
    found = upload_parts.with_losses([*events, *compared], {1: 0, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1})
    assert [e.event.lost_steps for e in found[:6]] == [0, 2, 4, 0, 0, 0]
    assert found[6:] == compared


def test_names_of_parts_are_read_back():
    """A node's name with a dash and a dot, and names of other things."""
    source, part = "events/host.a-1-agent.jsonl", upload_parts.part_name
    sizes = {part(source, 4096): 10, source: 99_999, part(source, 0): 4096}
    assert upload_parts.uploaded_bytes(sizes) == {source: 4106}
    nodes = {(4, 9): "a-b.c-1", (10, 12): "z"}
    names = [upload_parts.metrics_part_name(2, *steps, node) for steps, node in nodes.items()]
    assert upload_parts.uploaded_steps([*names, "metrics/other"]) == {2: 12}


def test_a_part_of_a_file_ends_with_a_line(tmp_path, monkeypatch):
    """Events that wait for the store are more than one part; the reader takes each apart by itself.
    A line that is longer than a part is cut all the same: it must not hold up the others.
    """
    monkeypatch.setattr(log_shipper, "PART_BYTES", 16)
    path = tmp_path / "a.jsonl"
    lines = [b"one\n", b"two and more\n", b"three\n", b"x" * 20 + b"\n", b"last\n", b"torn"]
    path.write_bytes(b"".join(lines))
    parts = []
    while part := log_shipper._whole_lines(path, sum(map(len, parts))):
        parts.append(part)
    assert parts == [b"one\n", b"two and more\n", b"three\n", b"x" * 16, b"x" * 4 + b"\nlast\n"]
