"""The commit protocol over a store that crashes, lies and interleaves, without a disk and without
time.
"""

import itertools
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from payloads import bytes_of, commit_payload, payload_of, record_name

from elastic.checkpoint.catalog import list_commits, verify
from elastic.checkpoint.prune import prune
from elastic.errors import Fenced, StoreFailed
from elastic.storage.store import StoreRefused, StoreUnavailable, create_or_read
from elastic.testing.fakes import FakeClock, FakeStore


class Crash(BaseException):
    """The process is gone: nothing of it runs any more, no cleaning up either."""


def image_of(step, generation=1, state="d"):
    """Other bytes by each generation, and the same state."""
    return payload_of(f"{state} of step {step}".encode() * 3, generation=generation)


def run_commit(store, step, generation=1, *, state="d", **options):
    image = image_of(step, generation, state)
    return commit_payload(store, image, step, generation=generation, **{"clock": FakeClock()} | options)


def run_prune(store, step, *, keep, generation=1, newest=lambda: 1, resumed_from=None):
    """After the commit of `step`."""
    when = {"step": step, "generation": generation, "resumed_from": resumed_from}
    prune(store, FakeClock(), run_id="r", keep=keep, is_newest=lambda: newest() <= generation, **when)


def loadable_steps(store, *, needed=0):
    """Steps of all records; every one of them must load and hold its own image, or have lost its
    payload where its step is not needed.
    """
    clock = FakeClock()
    records, damages = list_commits(store, clock)
    assert damages == []
    for record in records:
        if record.step >= needed or record.payload in store.objects:
            assert bytes_of(store, record, clock) == image_of(record.step, record.generation)
    return [record.step for record in records]


@given(st.integers(0, 40))
def test_a_crash_anywhere_leaves_the_last_commit_loadable(operation):
    """Saves and prunes step by step and crashes before the n-th operation of the store, or half-way
    through a write. What it leaves over goes with the next pruning, of a newer generation.
    """
    store = FakeStore()
    run_commit(store, 1)
    count = itertools.count()

    def before(verb, name):
        if next(count) >= operation:
            raise Crash

    store.before = before
    acknowledged = 1
    with suppress(Crash):
        for step in (2, 3):
            run_commit(store, step)
            acknowledged = step
            run_prune(store, step, keep=1)
    after = FakeStore(store.objects)
    steps = loadable_steps(after)
    assert steps
    assert steps[0] >= acknowledged
    run_commit(after, 4, generation=2)
    run_prune(after, 4, keep=1, generation=2, resumed_from=steps[0])
    assert len(after.objects) == 2
    assert loadable_steps(after) == [4]


WRITERS = [(1, [2]), (1, [2, 3]), (2, [2, 3, 4])]  # the generation and the steps of each
PLACES = st.integers(0, 30)
STANDS = st.tuples(PLACES, st.none() | PLACES)


@example(((5, None), (18, 19), (99, None)), False)
@given(st.tuples(STANDS, STANDS, st.just((99, None))), st.booleans())
def test_two_writers_of_one_step_make_a_loadable_checkpoint(stands, is_cut_off):
    """Each writer stands still before one of its operations, or at its end, until the next one has
    ended, and may crash before one. The first is a zombie: it saves step 2 alone, which the others
    leave behind. Generation 2 is formed when its writer begins, from which the fence stops the
    others, unless their rendezvous is out of reach: then they commit by the last number, and delete
    nothing.

    A save that was acknowledged must be there afterwards, or a newer one. Where a writer crashes,
    an older record may stay without its payload until the next sweep.
    """
    objects, acknowledged, begun = {}, [], []
    run_commit(FakeStore(objects), 1)

    def newest():
        return WRITERS[len(begun) - 1][0]

    def write():
        (generation, steps), (stand, crash) = WRITERS[len(begun)], stands[len(begun)]
        begun.append(generation)
        own, operations, store = len(begun), itertools.count(), FakeStore(objects)

        def goes_on():
            if len(begun) == own < len(WRITERS):
                write()

        def before(verb, name):
            number = next(operations)
            if number == stand:
                goes_on()
            if number == crash:
                raise Crash

        store.before = before
        knows = not is_cut_off or generation == 2
        is_fenced = (lambda: newest() > generation) if knows else (lambda: False)
        with suppress(Crash, StoreFailed, Fenced):
            for step in steps:
                run_commit(store, step, generation, is_fenced=is_fenced)
                acknowledged.append(step)
                run_prune(store, step, keep=1, generation=generation, newest=newest if knows else lambda: 9)
        goes_on()

    write()
    needed = max(acknowledged, default=1)
    has_crashed = any(crash is not None for _, crash in stands)
    steps = loadable_steps(FakeStore(objects), needed=needed if has_crashed else 0)
    assert steps
    assert steps[0] >= needed


@given(st.integers(0, 12), st.integers(1, 3))
def test_a_generation_that_is_not_the_newest_deletes_nothing(formed_at, keep):
    """Generation 2 is formed before some operation of a pruning. It may resume from any step, when
    all newer ones are damaged: from then on none may go.
    """
    store, operations, formed = FakeStore(), itertools.count(), []
    for step in (1, 2, 3, 4):
        run_commit(store, step)

    def before(verb, name):
        if next(operations) >= formed_at and not formed:
            formed.append(dict(store.objects))

    store.before = before
    with suppress(Fenced):
        run_prune(store, 4, keep=keep, newest=lambda: 2 if formed else 1)
    assert not formed or len(formed[0].keys() - store.objects.keys()) <= 1
    assert loadable_steps(FakeStore(store.objects))[:keep] == [4, 3, 2][:keep]


def test_a_record_without_a_payload_goes_once_it_is_old():
    """Its payload was deleted by hand. Else `verify` would report it for ever."""
    store = FakeStore()
    for step in (1, 2, 3):
        run_commit(store, step)
    del store.objects[list_commits(store, FakeClock())[0][-1].payload]
    run_prune(store, 3, keep=2)
    assert loadable_steps(store) == [3, 2]
    del store.objects[list_commits(store, FakeClock())[0][0].payload]
    run_prune(store, 3, keep=1)  # it does not count, and step 2 stays
    assert {record_name(store, 2), record_name(store, 3)} <= store.objects.keys()


def fail_once(*verbs, error=None):
    """Raise at the first call of each verb."""
    left = list(verbs)

    def act(verb, name):
        if verb in left:
            left.remove(verb)
            raise error or StoreUnavailable(f"{verb} timed out")

    return act


@pytest.mark.parametrize(
    ("before", "after"),
    [(["write"], []), (["write-half"], []), (["create"], []), ([], ["create"] * 99), (["list"], ["create"])],
)
def test_a_call_that_fails_is_tried_again(before, after):
    """A timeout before a verb takes effect, or after it: then the name is taken, by ourselves. A
    store may lose every answer.
    """
    store = FakeStore()
    store.before, store.after = fail_once(*before), fail_once(*after)
    assert run_commit(store, 1).is_ours
    assert loadable_steps(store) == [1]


@pytest.mark.parametrize("seen", [[], ["upload", "before-commit"]])
def test_a_fenced_writer_commits_nothing(seen):
    """A newer generation is there before the save begins, and the writer does not even upload; or
    it appears while the payload is written, and the attempt is withdrawn.
    """
    store, points = FakeStore(), []
    with pytest.raises(Fenced):
        run_commit(store, 1, is_fenced=lambda: not seen or "upload" in points, reached=points.append)
    assert points == seen
    assert store.objects == {}


def test_a_writer_past_its_deadline_commits_nothing():
    """The process was stopped between payload and record for longer than the deadline: others may
    have swept its payload.
    """
    store, clock = FakeStore(), FakeClock()

    def reached(point):
        clock.now += 101.0 if point == "before-commit" else 0.0

    with pytest.raises(StoreFailed, match="deadline"):
        run_commit(store, 1, clock=clock, reached=reached)
    assert loadable_steps(store) == []


def test_a_record_of_a_call_that_failed_keeps_its_payload():
    """The disk is full when the record's name is to be synced: the name may be there, and stay. A
    record without its payload would be damage, and there may be no other checkpoint.
    """
    store = FakeStore()
    store.after = fail_once("create", error=StoreRefused("no space left on device"))
    with pytest.raises(StoreFailed, match="no space"):
        run_commit(store, 1)
    assert loadable_steps(store) == [1]


@pytest.mark.parametrize(("late_s", "is_taken"), [(300.0, False), (300.0, True), (0.0, True)])
def test_a_record_whose_payload_is_gone_by_then_is_taken_back(late_s, is_taken):
    """The writer stood still right before it created its record, for three deadlines or a moment,
    and `--fresh` or retention has taken its payload. A late record with its payload counts.
    """
    store, clock = FakeStore(), FakeClock()

    def before(verb, name):
        if verb == "create":
            clock.now += late_s
            if is_taken:
                store.objects.clear()

    store.before = before
    if is_taken:
        with pytest.raises(StoreFailed, match=r"created (after its deadline|when its payload was gone)"):
            run_commit(store, 1, clock=clock)
        assert store.objects == {}
    else:
        assert run_commit(store, 1, clock=clock).is_ours
        assert loadable_steps(store) == [1]


def test_a_step_that_another_writer_committed_stays_theirs():
    """A good checkpoint is as good as our own, which is withdrawn; one with another state stays as
    well, and nothing says that it is right.
    """
    store = FakeStore()
    first = run_commit(store, 1, state="one")
    for state in ("one", "two"):
        second = run_commit(store, 1, generation=2, state=state)
        assert (second.is_ours, second.difference != "") == (False, state == "two")
        assert second.record == first.record
    assert "move checkpoints/000000000001 out" in second.difference
    assert len(store.objects) == 2


@pytest.mark.parametrize("what", ["record", "another's record", "payload", "missing"])
def test_a_damaged_checkpoint_of_the_step_is_replaced_untouched(what):
    """The run fell back behind a damaged step and reaches it again.

    Taking the old record for a commit would leave nothing to load.
    """
    store = FakeStore()
    old = run_commit(store, 5).record
    if what == "record":
        store.objects[old.name] = b"{}"
    elif what == "another's record":  # copied there by a person
        store.objects[old.name] = store.objects[run_commit(store, 4).record.name]
    elif what == "payload":
        store.objects[old.payload] = b"x" + store.objects[old.payload][1:]
    else:
        del store.objects[old.payload]
    before = dict(store.objects)
    new = run_commit(store, 5, generation=2)
    assert new.is_ours
    assert before.items() <= store.objects.items()
    newest = list_commits(store, FakeClock())[0][0]
    assert newest == new.record
    assert bytes_of(store, newest, FakeClock()) == image_of(5, 2)
    assert [damage.step for damage in verify(store, FakeClock())] == [5]


def test_a_payload_reported_shorter_is_not_committed():
    """A gateway accepts the upload and keeps half of it."""
    store = FakeStore()
    write = store.write
    store.write = lambda *words: write(*words) // 2
    with pytest.raises(StoreFailed, match="reports"):
        run_commit(store, 1)
    assert loadable_steps(store) == []


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("late_after", [None, "list", "delete"])
def test_an_old_attempt_of_an_older_generation_is_swept(generation, late_after):
    """Its record may be created after the listing, by a writer that has seen its payload there. The
    attempt of a writer of this generation stays: it is about to be committed.
    """
    store = FakeStore()
    run_commit(store, 1)
    named = record_name(store, 1)
    record = store.objects.pop(named)
    for step in (2, 3):
        run_commit(store, step, generation=2)
    (attempt,) = (name for name in store.objects if name.startswith("000000000001/"))
    written = []

    def after(verb, name):
        if verb == late_after and not written:
            written.append(name)
            store.objects[named] = record

    store.after = after
    run_prune(store, 3, keep=1, generation=generation, newest=lambda: 1)
    assert (attempt in store.objects) is (generation == 1)
    store.after = lambda verb, name: None
    assert loadable_steps(store) == ([3, 1] if generation == 1 and written else [3])


def test_what_retention_deletes_meanwhile_is_no_damage():
    """`verify` of a run that trains: the older payload goes before it is read."""
    store = FakeStore()
    old, _ = [run_commit(store, step).record for step in (1, 2)]
    listed = []

    def before(verb, name):
        if listed.count("read") >= 2 and verb == "read" and name.startswith("000000000002"):
            store.before = lambda verb, name: None
            run_prune(store, 2, keep=1)

    store.after = lambda verb, name: listed.append(verb)
    store.before = before
    assert verify(store, FakeClock()) == [] and old.name not in store.objects
    assert loadable_steps(store) == [2]


def test_a_creation_whose_answer_is_lost_is_the_one_that_counts():
    """The first node creates run.json and gets an error; then a second node comes."""
    store = FakeStore()
    store.after = fail_once("create")
    assert create_or_read(store, "run.json", b"first", FakeClock()) == b"first"
    assert create_or_read(store, "run.json", b"second", FakeClock()) == b"first"
