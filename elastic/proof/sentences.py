"""What a user reads where two computations of one step differ: what, why, and what to do."""

from collections.abc import Sequence

from elastic.proof.evidence import ComputedStep, Verdict, not_restored, roots

MOST_NAMES = 3


def alike(step: int, seconds: float, not_restored: Sequence[str], is_rehearsal: bool) -> str:
    what = f"rehearsed step {step}" if is_rehearsal else f"the new group did step {step} again"
    names = ", ".join(not_restored[:MOST_NAMES]) + (" and more" if len(not_restored) > MOST_NAMES else "")
    kept = f"; a restart does not bring back {names}: what later steps read of it belongs in elastic.Values (report says more)"
    return f"{what}: same bits, {seconds:.1f} s{kept if names else ''}"


def accepted(step: int, names: Sequence[str], excuse: str) -> str:
    return f"step {step} was done again and differs in {named(names)}; the run goes on with what it computed now, since {excuse}"


def once_more(step: int, names: Sequence[str]) -> str:
    return f"step {step} was done again and differs in {named(names)}; it is done a third time"


def wrong_once(step: int, names: Sequence[str]) -> str:
    return (
        f"step {step} was done three times, and once {named(names)} differed: a machine computed wrongly, "
        "or an algorithm is not deterministic. The run goes on with what came out twice"
    )


def differs(first: ComputedStep, last: ComputedStep, names: Sequence[str], judged: Verdict) -> str:
    """Of at most six lines."""
    step = first.step
    why = (
        "Workers that were started anew agree with each other and not with those before: the script keeps "
        "something outside its State, or reads what has changed since (or the machine computed wrongly the first time)"
        if judged is Verdict.HIDDEN
        else "No two of three computations are alike: the script draws without a seed, reads the clock, or allows "
        "algorithms that are not deterministic"
    )
    variables = [name for name in roots(not_restored(first, last)) if not name.startswith("the log's ")]
    kept = f"\nA restart does not bring back {', '.join(variables[:MOST_NAMES])}." if variables else ""
    shards = [name for name in names if name.startswith("the loss of shard")]
    if judged is Verdict.HIDDEN and first.world_size != last.world_size:
        why += f" (the number of workers too: {first.world_size} then, {last.world_size} now; a node that joined may have other files)"
    return (
        f"step {step} was done again from the state of step {step - 1} and differs: first {named(names)}.\n"
        f"{why}.{kept}"
        + (f"\n{len(shards)} shards differ." if shards else "")
        + "\nGive what it keeps to elastic.State (elastic.Values for numbers), or make it from step.number."
        "\nMend the script and give the same command (where its State has other "
        "entries then, begin from this run: --from RUN:ENTRIES --run-dir NEW); or --accept goes on with what a restart computes"
    )


def ends_now(step: int) -> str:
    return (
        f"step {step} was done again and the loop is left in it, which it was not the first time: what ends the loop is kept outside the State. "
        "Give it to elastic.Values, or make it from step.number and from losses"
    )


def named(names: Sequence[str]) -> str:
    more = len(names) - 1
    return (names[0] if names else "nothing") + (f" and {more} more" if more > 0 else "")
