"""Messages of a socket are found whole in its stream of bytes, and none may be endless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.system.json_lines import JsonLines, to_line


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers()), max_size=5), st.data())
def test_messages_survive_any_cutting_of_the_stream(messages, data):
    """Cuts the bytes of several messages at arbitrary places, as a socket may."""
    stream = b"".join(map(to_line, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    lines, found = JsonLines(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += lines.feed(stream[start:end])
    assert found == messages


def test_an_endless_line_is_refused():
    """A client that never ends its line would fill the uploader's memory."""
    lines = JsonLines()
    with pytest.raises(ValueError, match="longer"):
        lines.feed(b"x" * 70_000)
