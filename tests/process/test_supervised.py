"""A run of the cluster harness leaves nothing, whatever stops it and whenever."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]
ROOT = Path(__file__).parents[2]
# As the harness: a session of its own, a mount where that is allowed, and a child that has lost its
# parent. It plays on until it is stopped.
SCRIPT = """
import subprocess, sys, tempfile, time
from pathlib import Path
from supervised import supervised

def play(run):
    folder = tempfile.mkdtemp()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True)
    orphan = subprocess.run(["setsid", "sh", "-c", "sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE)
    print(folder, orphan.stdout.decode().strip(), flush=True)
    return 3 if sys.argv[1] == "ends" else time.sleep(600)

sys.exit(supervised(play))
"""


@pytest.mark.parametrize(
    ("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 3)], ids=["Ctrl-C", "TERM", "end"]
)
def test_no_process_mount_or_folder_is_left(tmp_path, stop, code):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "cluster")])
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "ends" if stop is None else "stays"],
        env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    ) as harness:
        folder, orphan = harness.stdout.readline().split()
        if stop is not None:
            harness.send_signal(stop)
        assert harness.wait(timeout=30) == code
    assert not Path(f"/proc/{orphan}").exists()
    assert folder not in Path("/proc/self/mounts").read_text()
    assert list(tmp_path.iterdir()) == []
