"""Messages to users are short: what was expected, what was found, what to do."""

from messages import SNAPSHOT, listing, messages

LONGER = 0


def test_messages_are_no_longer_than_they_may_be():
    """Shorten a message, and lower the number."""
    longer = [f"{each.size} {each.file}: {each.text}" for each in messages() if each.size > each.most]
    assert len(longer) <= LONGER, "\n".join(sorted(longer))


def test_messages_are_those_that_were_read_last():
    """After a change: `make messages`, and read the difference."""
    assert listing() == SNAPSHOT.read_text()
