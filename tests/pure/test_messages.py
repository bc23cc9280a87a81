"""Messages to users are short: what was expected, what was found, what to do."""

from messages import SNAPSHOT, listing, messages


def test_messages_are_short_and_those_that_were_read_last():
    """After a change: `make messages`, and read the difference."""
    found = messages()
    assert [each for each in found if each.size > each.most] == []
    assert listing(found) == SNAPSHOT.read_text()
