"""A script that knows nothing of the trainer: torchrun's variables, one all-reduce. PLAIN_DIES: rank 1 does, in its first life."""

import json
import os
import signal

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
if "PLAIN_RAISES" in os.environ and dist.get_rank() == 1:
    raise RuntimeError("the script's own mistake")
dist.barrier()
dist.destroy_process_group()
print(json.dumps({"total": total.item()} | {name: os.environ[name] for name in VARIABLES}))
