"""What ranks log of the batch is compared between them."""

from elastic.proof.logged_numbers import LoggedNumbers, differing, note


def test_a_number_that_differs_in_the_same_step_is_found_with_what_ranks_logged():
    """Rank 0 logs the accuracy of its last shard, and so does rank 1; the learning rate is one."""
    ranks = [LoggedNumbers(), LoggedNumbers()]
    for rank, logged in enumerate(ranks):
        logged.add(1, {"acc": 0.25 + rank, "lr": 0.1, "host": f"node{rank}", "bad": float("nan")})
    found = differing([each.take() for each in ranks])
    assert found == {"acc": ["0.25", "1.25"]}
    assert "acc (0.25 on rank 0, 1.25 on another)" in note(found, 1)


def test_what_one_rank_logs_alone_or_in_another_step_is_not_compared():
    first, second = LoggedNumbers(), LoggedNumbers()
    first.add(3, {"best": 1.0, "alone": 2.0})
    second.add(2, {"best": 3.0})
    second.add(3, {})
    assert differing([first.take(), second.take()]) == {}


def test_a_metric_of_an_epochs_end_waits_for_the_next_comparison():
    """It is logged at step 5 alone; ranks compare after steps 4 and 8."""
    logged, due = LoggedNumbers(), []
    for step in range(1, 9):
        logged.add(step, {"val": 0.5} if step == 5 else {})
        if logged.is_due(is_last=False):
            due.append((step, logged.take()))
    assert [step for step, _ in due] == [1, 2, 4, 8]
    assert due[-1][1] == {"val": (5, "0.5")}
    assert logged.is_due(is_last=True)
