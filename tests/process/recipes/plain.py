"""A script that does not use this library: torchrun's variables and one all-reduce.

PLAIN_DIES      Rank 1 kills itself in its first life.
PLAIN_SUMS      Path. Each rank makes the file PATH-<rank>-of-<world size>, and all go on adding
                numbers until rank 0 finds a file at PATH.
"""

import json
import os
import signal
from pathlib import Path

VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip
found = {name: os.environ[name] for name in VARIABLES}
if "PLAIN_DIES" in os.environ and (found["RANK"], found["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    os.kill(os.getpid(), signal.SIGKILL)
if "PLAIN_SUMS" in os.environ:
    Path(f"{os.environ['PLAIN_SUMS']}-{found['RANK']}-of-{found['WORLD_SIZE']}").touch()

# Takes seconds, which a life that ends before it does not.
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
enough = torch.zeros(1)
while "PLAIN_SUMS" in os.environ and not enough.item():
    enough = torch.tensor([float(dist.get_rank() == 0 and Path(os.environ["PLAIN_SUMS"]).exists())])
    dist.all_reduce(enough)
dist.barrier()
dist.destroy_process_group()
print(json.dumps({"total": total.item()} | found))
