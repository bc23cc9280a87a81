"""The script of benchmarks/agents.py: says that it runs, and waits. It imports no torch."""

import os
import signal
import time

line = f"{time.time()},{os.environ['GROUP_RANK']},{os.environ['WORLD_SIZE']},{os.getpid()}\n"
with open(os.environ["AGENTS_LOG"], "ab", buffering=0) as log:  # noqa: PTH123 - no pathlib: it starts sooner
    log.write(line.encode())
while True:
    signal.pause()
