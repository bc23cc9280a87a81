"""A script that does not use this library: torchrun's variables and one all-reduce.

PLAIN_DIES      Rank 1 kills itself in its first life.
PLAIN_SUMS      Path. All ranks go on adding numbers until rank 0 finds a file there. Each makes the
                file PATH-<rank>-of-<world size> before.
"""

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if "PLAIN_DIES" in os.environ and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if "PLAIN_SUMS" in os.environ:
    Path(f"{os.environ['PLAIN_SUMS']}-{dist.get_rank()}-of-{dist.get_world_size()}").touch()
found = torch.zeros(1)
while "PLAIN_SUMS" in os.environ and not found.item():
    found = torch.tensor([float(dist.get_rank() == 0 and Path(os.environ["PLAIN_SUMS"]).exists())])
    dist.all_reduce(found)
dist.barrier()
dist.destroy_process_group()
print(json.dumps({"total": total.item()} | {name: os.environ[name] for name in VARIABLES}))
