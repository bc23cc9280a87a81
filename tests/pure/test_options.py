"""A command line and variables become the options that they spell, or one sentence."""

import re
import signal
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config.durations import Every
from elastic.config.identity import Origin
from elastic.config.options import FLAGS, OPTIONS_HELP, ListenAddress, Options, asks_for, parse
from elastic.errors import UsageError
from elastic.system.stop_signals import WARNINGS

words = st.text("abcxyz019./:-_ ", min_size=1).filter(
    lambda text: not text.startswith("-") and text.strip() and "://" not in text
)
seconds = st.integers(0, 10**6).map(lambda thousandths: thousandths / 1000)
auto, off = st.just(Every(kind="auto")), st.just(Every(kind="off"))
in_steps = st.integers(1, 10**9).map(lambda n: Every(kind="steps", value=float(n)))
in_seconds = st.integers(1, 10**6).map(lambda n: Every(kind="seconds", value=n / 1000))
few, text = st.integers(1, 99), st.none() | words
VALUES = {
    "run_dir": words,
    "fresh": st.booleans(),
    "accept": st.booleans(),
    "from_": st.none() | words.map(lambda word: Origin.parse(f"{word}/")),
    "min_nodes": st.integers(1, 9),
    "max_nodes": st.integers(9, 99),
    "nproc_per_node": st.just("auto") | few,
    "rdzv_backend": st.sampled_from(["dir", "c10d", "etcd"]),
    "rdzv_endpoint": words,
    "rdzv_id": text,
    "max_restarts": st.integers(0, 99),
    "save_every": auto | in_steps | in_seconds,
    "snapshot_every": auto | off | in_steps,
    "snapshot_copies": st.sampled_from([1, 2]),
    "audit": auto | off | in_steps,
    "rehearse": auto | off | in_steps,
    "balance": st.sampled_from(["auto", "off"]),
    "standby": st.sampled_from(["auto", "on", "off"]),
    "keep": few,
    "hang_timeout": auto | off | in_seconds,
    "grace_s": seconds,
    "drain_signals": st.lists(st.sampled_from(WARNINGS), unique=True).map(tuple),
    "notice": st.sampled_from([None, "aws", "gcp", "azure"]),
    "notice_file": text,
    "notice_command": text,
    "faults": text,
    "last_call_s": seconds,
    "join_window_s": seconds,
    "keep_alive_s": st.sampled_from([0.05, 2.0, 86_400.0]),
    "rdzv_timeout_s": seconds,
    "local_addr": text,
    "http": st.none() | st.integers(0, 65535).map(lambda port: ListenAddress(host="h", port=port)),
    "tensorboard": text,
}
all_options = st.builds(
    Options, recipe=words, recipe_args=st.lists(st.text(max_size=5), max_size=4).map(tuple), **VALUES
)


def text_of(every: Every) -> str:
    return {"steps": f"{every.value:.0f}steps", "seconds": f"{every.value:.3f}s"}.get(every.kind, every.kind)


def written(options: Options) -> dict[str, str | None]:
    """By field, every option that is set, as a user would type it; None for a flag."""
    found = {}
    for name in FLAGS:
        value = getattr(options, name)
        if isinstance(value, tuple):
            value = ",".join(each.name for each in value) or "none"
        if value is not None and value is not False:
            found[name] = (
                None if value is True else text_of(value) if isinstance(value, Every) else str(value)
            )
    return found


@given(all_options, st.randoms(use_true_random=False))
def test_options_mean_the_same_in_any_order(options, random):
    """They are shuffled, with the recipe at a random place among them."""
    parts = [[options.recipe]]
    for name, value in written(options).items():
        parts.append([FLAGS[name]] if value is None else [FLAGS[name], value])
    random.shuffle(parts)
    argv = [word for part in parts for word in part] + ["--", *options.recipe_args]

    assert parse(argv) == options


def test_the_help_names_every_option_once():
    """A field of Options that lacks its line in the help fails here, and a line without a field."""
    flags = [
        "--" + each.name.removesuffix("_s").rstrip("_").replace("_", "-") for each in fields(Options)[2:]
    ]
    assert sorted(re.findall(r"^  (--\S+)", OPTIONS_HELP, re.MULTILINE)) == sorted(flags)
    assert list(FLAGS.values()) == flags and FLAGS.keys() == VALUES.keys()


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ("--save-every 10min", Every(kind="seconds", value=600.0)),
        ("--snapshot-every 7", Every(kind="steps", value=7.0)),
        ("--drain-signals none", ()),
        ("--drain-signals hup,SIGUSR1,HUP", (signal.SIGHUP, signal.SIGUSR1)),
        ("--hang-timeout 60", Every(kind="seconds", value=60.0)),
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
        (["a.py", "b.py"], "or a command that --help names, found a.py and b.py"),
        (["a.py", "--epochs", "3"], "unknown option --epochs; an option of the recipe comes after --"),
        (["a.py", "--minnodes=2"], "did you mean --min-nodes?"),
        (["a.py", "--min-nodes", "2"], "found 2 and 1; give --max-nodes 2 or more"),
        (["a.py", "--keep", "0"], "--keep: expected a whole number of at least 1, found '0'"),
        (["a.py", "--grace", "nan"], "--grace: expected seconds"),
        (["a.py", "--keep-alive", "0"], "--keep-alive: expected 0.05 s to a day, found '0'"),
        (["a.py", "--hang-timeout", "0"], "--hang-timeout: expected seconds above 0"),
        (["a.py", "--save-every", "5"], "--save-every: expected 500steps"),  # of what?
        (["a.py", "--drain-signals", "USR1,KILL"], "names of USR1, USR2, HUP with commas between them, or"),
        (["a.py", "--drain-signals", "TERM"], "found 'TERM' (it always asks for a drain)"),
        (["a.py", "--notice", "AWS"], "--notice: invalid choice: 'AWS' (choose from"),
        (["a.py", "--rdzv-backend", "c10d"], "expected --rdzv-endpoint with --rdzv-backend c10d, found none"),
        (["a.py", "--min", "1"], "unknown option --min"),
        # Each node would form a group of its own in a local folder, and all would write one run.
        (["a.py", "--run-dir", "sftp://h/run", "--max-nodes", "2"], "expected a place where nodes can meet"),
        (["a.py", "--rdzv-endpoint", "hdfs://h/meet"], "expected a place where nodes can meet"),
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
        ("r.py --run-dir s3://b/run --rdzv-backend etcd --rdzv-endpoint h", False, 2.0),
        ("r.py --run-dir file:///run --max-nodes 2 --rdzv-endpoint file:///shared/meet", False, 2.0),
    ],
)
def test_in_an_object_store_nodes_may_be_silent_for_longer(words, meets_in_objects, keep_alive_s):
    """Only if the group's state is in the store, and --keep-alive was not given."""
    options = parse(words.split())
    assert (options.meets_in_objects, options.keep_alive_s) == (meets_in_objects, keep_alive_s)
