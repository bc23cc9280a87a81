"""A command line becomes the options that it spells, or one sentence about its mistake."""

import re
import signal
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config.durations import Every
from elastic.config.options import OPTIONS_HELP, Options, asks_for, parse
from elastic.config.parent import Origin
from elastic.errors import UsageError
from elastic.system.stop_signals import WARNINGS

words = st.text("abcxyz019./:-_ ", min_size=1).filter(
    lambda text: not text.startswith("-") and text.strip() and "://" not in text
)
seconds = st.integers(0, 10**6).map(lambda thousandths: thousandths / 1000)
auto, off = st.just(Every(kind="auto")), st.just(Every(kind="off"))
in_steps = st.integers(1, 10**9).map(lambda n: Every(kind="steps", value=float(n)))
in_seconds = st.integers(1, 10**6).map(lambda n: Every(kind="seconds", value=n / 1000))


@st.composite
def all_options(draw) -> Options:
    low, high = sorted(draw(st.tuples(st.integers(1, 99), st.integers(1, 99))))
    backend = draw(st.sampled_from(["dir", "c10d", "etcd"]))
    return Options(
        recipe=draw(words),
        recipe_args=tuple(draw(st.lists(st.text(max_size=5), max_size=4))),
        run_dir=draw(words),
        fresh=draw(st.booleans()),
        accept=draw(st.booleans()),
        from_=draw(st.none() | words.map(lambda word: Origin.parse(f"{word}/"))),
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=draw(st.one_of(st.just("auto"), st.integers(1, 64))),
        rdzv_backend=backend,
        rdzv_endpoint=draw(st.none() | words if backend == "dir" else words),
        rdzv_id=draw(st.none() | words),
        max_restarts=draw(st.integers(0, 99)),
        save_every=draw(auto | in_steps | in_seconds),
        snapshot_every=draw(auto | off | in_steps),
        audit=draw(auto | off | in_steps),
        balance=draw(st.sampled_from(["auto", "off"])),
        keep=draw(st.integers(1, 99)),
        hang_timeout=draw(auto | off | in_seconds),
        grace_s=draw(seconds),
        drain_signals=tuple(draw(st.lists(st.sampled_from(WARNINGS), unique=True))),
        notice=draw(st.sampled_from([None, "aws", "gcp", "azure"])),
        notice_file=draw(st.none() | words),
        notice_command=draw(st.none() | words),
        faults=draw(st.none() | words),
        last_call_s=draw(seconds),
        join_window_s=draw(seconds),
        keep_alive_s=draw(seconds),
        rdzv_timeout_s=draw(seconds),
        local_addr=draw(st.none() | words),
    )


def flag(field: str) -> str:
    return "--" + field.removesuffix("_s").rstrip("_").replace("_", "-")


def _text(value: object) -> str:
    return str(value) if not isinstance(value, tuple) else ",".join(each.name for each in value) or "none"


def written(options: Options) -> list[list[str]]:
    """Every option that is set, as a user would type it."""
    flags = {"--fresh": options.fresh, "--accept": options.accept}
    parts = [[each] for each, is_set in flags.items() if is_set]
    for field in fields(Options):
        value = getattr(options, field.name)
        if field.name not in ("recipe", "recipe_args", "fresh", "accept") and value is not None:
            parts.append([flag(field.name), _text(value)])
    return parts


@given(all_options(), st.randoms(use_true_random=False))
def test_options_mean_the_same_in_any_order_before_or_after_the_recipe(options, random):
    """All options are shuffled, with the recipe at a random place among them."""
    parts = [*written(options), [options.recipe]]
    random.shuffle(parts)
    argv = [word for part in parts for word in part] + ["--", *options.recipe_args]

    assert parse(argv) == options


def test_the_help_names_every_option_once_and_nothing_else():
    """A field of Options that lacks its line in the help fails here, and a line without a field."""
    named = re.findall(r"^  (--\S+)", OPTIONS_HELP, re.MULTILINE)
    assert sorted(named) == sorted(flag(field.name) for field in fields(Options)[2:])


@given(auto | off | in_steps | in_seconds)
def test_an_interval_reads_back_from_its_text(value):
    """Agents pass intervals to their workers as text."""
    assert Every.parse(str(value)) == value


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ("--save-every 500steps", Every(kind="steps", value=500.0)),
        ("--save-every 1step", Every(kind="steps", value=1.0)),
        ("--save-every 10min", Every(kind="seconds", value=600.0)),
        ("--save-every 1.5min", Every(kind="seconds", value=90.0)),
        ("--save-every 30s", Every(kind="seconds", value=30.0)),
        ("--snapshot-every 7", Every(kind="steps", value=7.0)),
        ("--snapshot-every off", Every(kind="off")),
        ("--drain-signals none", ()),
        ("--drain-signals hup,SIGUSR1,HUP", (signal.SIGHUP, signal.SIGUSR1)),
        ("--hang-timeout 60", Every(kind="seconds", value=60.0)),
        ("--hang-timeout 0.5h", Every(kind="seconds", value=1800.0)),
    ],
)
def test_each_option_reads_its_published_grammar(words, every):
    """A number alone is steps for one option, seconds for another."""
    flag, value = words.split()
    assert getattr(parse(["a.py", flag, value]), flag[2:].replace("-", "_")) == every


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "expected a recipe, found none"),
        (["a.py", "b.py"], "expected one recipe, found a.py and b.py"),
        (["a.py", "--epochs", "3"], "unknown option --epochs; an option of the recipe comes after --"),
        (["a.py", "--minnodes=2"], "did you mean --min-nodes?"),
        (["a.py", "--min-nodes", "2"], "found 2 and 1; give --max-nodes 2 or more"),
        (["a.py", "--keep", "0"], "--keep: expected a whole number of at least 1, found '0'"),
        (["a.py", "--grace", "nan"], "--grace: expected seconds"),
        (["a.py", "--hang-timeout", "0"], "--hang-timeout: expected seconds above 0"),
        (["a.py", "--save-every", "5"], "--save-every: expected 500steps"),  # of what?
        (["a.py", "--save-every", "1.5steps"], "--save-every: expected 500steps"),
        (["a.py", "--snapshot-every", "10min"], "a number of steps, auto or off"),  # ranks count alike
        (["a.py", "--snapshot-every", "9" * 20], "a number of steps, auto or off"),
        (
            ["a.py", "--drain-signals", "USR1,KILL"],
            "names of USR1, USR2, HUP with commas between them, or none, found 'KILL'",
        ),
        (["a.py", "--drain-signals", "TERM"], "found 'TERM' (it always asks for a drain)"),
        (["a.py", "--notice", "AWS"], "--notice: expected aws, gcp or azure, found 'AWS'"),
        (
            ["a.py", "--rdzv-backend", "zookeeper"],
            "--rdzv-backend: expected dir, c10d or etcd, found 'zookeeper'",
        ),
        (["a.py", "--rdzv-backend", "c10d"], "expected --rdzv-endpoint with --rdzv-backend c10d, found none"),
        (["a.py", "--run-dir"], "--run-dir: expected one argument"),
        (["a.py", "--min", "1"], "unknown option --min"),
    ],
)
def test_a_mistake_is_answered_with_what_was_expected_and_found(argv, says):
    """One mistake each."""
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert says in str(caught.value)


def test_words_after_the_double_dash_belong_to_the_recipe():
    """A second -- and options with names of ours among them; --help before it is ours."""
    options = parse(["a.py", "--", "--keep", "9", "--", "--help"])
    assert asks_for(["a.py", "--help"], "-h", "--help")
    assert not asks_for(["a.py", "--", "--help"], "-h", "--help")
    assert options.keep == 3
    assert options.recipe_args == ("--keep", "9", "--", "--help")


@pytest.mark.parametrize(
    ("words", "meets_in_objects", "keep_alive_s"),
    [
        ("r.py", False, 2.0),
        ("r.py --run-dir s3://b/run", True, 15.0),
        ("r.py --run-dir s3://b/run --keep-alive 2", True, 2.0),
        ("r.py --rdzv-endpoint s3://b/meet", True, 15.0),
        ("r.py --run-dir s3://b/run --rdzv-endpoint /shared/meet", False, 2.0),
        ("r.py --run-dir s3://b/run --rdzv-backend etcd --rdzv-endpoint h", False, 2.0),
        ("r.py --run-dir file:///run --max-nodes 2 --rdzv-endpoint file:///shared/meet", False, 2.0),
    ],
)
def test_in_an_object_store_nodes_may_be_silent_for_longer(words, meets_in_objects, keep_alive_s):
    """Only if the group's state is in the store, and --keep-alive was not given."""
    options = parse(words.split())
    assert (options.meets_in_objects, options.keep_alive_s) == (meets_in_objects, keep_alive_s)


@pytest.mark.parametrize("words", ["--run-dir sftp://h/run --max-nodes 2", "--rdzv-endpoint hdfs://h/meet"])
def test_nodes_are_not_sent_to_a_url_where_they_cannot_meet(words):
    """Each would form a group of its own in a local folder, and all would write one run."""
    with pytest.raises(UsageError, match="expected a place where nodes can meet"):
        parse(["r.py", *words.split()])
