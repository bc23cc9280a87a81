"""A run that trains is shown by `elastic-train watch` in a real terminal, and by `--http`."""

import os
import re
import shlex
import subprocess
import sys
from urllib.request import urlopen


def test_watch_and_metrics_follow_the_run_that_trains(drill, tmp_path):
    """`watch` in a terminal, and `--http`, whose pages count a recovery."""
    drill.shut(8, 12)
    agent = drill.start("--snapshot-every", "1", "--http", "127.0.0.1:0")
    pattern = re.compile(r"metrics of this agent: http://(\S+)/metrics")
    where = drill.waits_for(lambda: pattern.search(agent.output), "the address of --http")[1]

    def page(name):
        with urlopen(f"http://{where}/{name}", timeout=30) as answer:
            return answer.read().decode()

    page("healthz")
    drill.stands(8, ranks=1)
    drill.kill_worker(0, generation=1)
    drill.happens("restored", generation=2)
    drill.open(8)
    drill.stands(12, ranks=1)
    counted = re.compile(r'^elastic_recoveries_total\{.*cause="failure".*\} 1\.0$', re.MULTILINE)
    drill.waits_for(lambda: counted.search(page("metrics")), "the recovery")
    assert page("readyz") == "ok: generation 2\n"
    typed = tmp_path / "terminal"
    command = [sys.executable, "-m", "elastic.cli", "watch", str(drill.run.local)]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    script = ["script", "--quiet", "--return", "--flush", "--command", shlex.join(command), str(typed)]
    with subprocess.Popen(script, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env) as watched:
        drill.waits_for(lambda: typed.exists() and "11 of 24" in typed.read_text(), "the newest step")
        assert "running" in typed.read_text()
        drill.open(12)
        agent.ends_with(0)
        assert watched.wait() == 0
    assert "finished after step 24" in typed.read_text()
    assert "24 of 24" in typed.read_text()
