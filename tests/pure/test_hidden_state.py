"""The table of hidden state is whole, and docs/proof.md says what was measured of it."""

import json

import measure
from kind import Acts
from measure import KINDS, Outcome

OUTCOMES = {name: Outcome(**each) for name, each in json.loads(measure.OUTCOMES.read_text()).items()}
EARLY = [kind for kind in KINDS if kind.acts in (Acts.STEP, Acts.EPOCH, Acts.NEVER)]


def test_the_document_says_what_was_measured():
    assert OUTCOMES.keys() == {kind.name for kind in KINDS}
    assert measure.document(OUTCOMES) == measure.DOCUMENT.read_text()


def test_nearly_all_that_acts_early_is_found_undisturbed():
    assert len([kind for kind in EARLY if OUTCOMES[kind.name].is_found]) >= 0.95 * len(EARLY)


def test_no_twin_is_refused_or_ended():
    for kind in KINDS:
        of = OUTCOMES[kind.name]
        assert all(each.partition(":")[0] in ("ok", "named") for each in (of.twin_one, of.twin_two)), (
            kind.name
        )
