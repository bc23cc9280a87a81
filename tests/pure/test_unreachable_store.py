"""A store that cannot be read is exit code 2 for what looks at a run: 1 is a finding."""

import pytest
from etcd_servers import free_port

COMMANDS = [
    "runs {}",
    "status {}/run",
    "report {}/run",
    "verify {}/run",
    "diff {}/run {}/run",
    "watch {}/run --once",
    "clean {}/run --json",
    "export {}/run model.pth",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_that_cannot_be_read_is_no_finding(command, s3_bucket, tmp_path, monkeypatch, printed):
    """Nothing listens there, or there is no such bucket. For `diff` and `verify` 1 would say that
    the runs differ, or are damaged.
    """
    monkeypatch.chdir(tmp_path)
    no_bucket = [f"{s3_bucket}-not"] * (not command.startswith(("runs", "export")))
    for url in (f"http://127.0.0.1:{free_port()}", *no_bucket):
        assert "elastic-train: expected " in printed(2, *command.replace("{}", url).split())


def test_an_empty_bucket_has_no_runs_and_nothing_to_verify(s3_bucket, printed):
    assert "no runs" in printed(0, "runs", s3_bucket)
    assert "found nothing there" in printed(2, "verify", f"{s3_bucket}/run")
