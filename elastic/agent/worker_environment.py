"""A worker has torchrun's variables, so that a script written for torchrun runs unchanged.

`ELASTIC_AGENT` holds what this library's own workers need beside them (config/environment.py).
"""

import os
import socket
from dataclasses import replace

from elastic.agent.settings import Settings
from elastic.agent.workers import WorkerStart
from elastic.config.environment import AgentLink, variables
from elastic.divergence import Divergence
from elastic.rendezvous.rendezvous import Generation
from elastic.rendezvous.transitions import REHEARSAL


def worker_starts(  # noqa: PLR0913 - what changes from generation to generation
    entered: Generation,
    settings: Settings,
    *,
    store: socket.socket | None,
    failures: int,
    divergence: Divergence | None,
    control_page: str,
    memory: str,
    uploader: str,
) -> list[WorkerStart]:
    """How to start each worker of a generation. store: the socket that the first of them serves."""
    options, is_plain = settings.options, not settings.imports_library
    link = AgentLink(
        pid=os.getpid(),
        node=settings.node,
        run_dir=settings.run.url,
        generation=entered.number,
        control_page=control_page,
        uploader=uploader,
        options=replace(options, recipe_args=()),
        memory=memory,
        failures=failures,
        committed_step=entered.committed_step,
        divergence=divergence,
        error_folder=str(settings.error_folder(entered.number)),
        parent=None if settings.declared is None else settings.declared.parent,
        imports_library=settings.imports_library,
        disturbs=entered.cause == REHEARSAL,
        evidence=str(settings.scratch / "evidence.json") if settings.does_steps_again else "",
    )
    return [
        WorkerStart(
            rank=entered.base_rank + local_rank,
            local_rank=local_rank,
            command=(options.recipe, *options.recipe_args),
            env=variables() | launcher_variables(entered, settings, local_rank) | link.to_env(),
            log=settings.run.free_log(generation=entered.number, rank=entered.base_rank + local_rank),
            is_plain=is_plain,
            store_fd=store.fileno() if store is not None and not local_rank else None,
        )
        for local_rank in range(settings.nproc)
    ]


def launcher_variables(entered: Generation, settings: Settings, local_rank: int) -> dict[str, str]:
    """What torchrun would set. Rank 0 of a script without this library opens the store itself."""
    options, host, port = settings.options, *entered.endpoint.rsplit(":", 1)
    rank = str(entered.base_rank + local_rank)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(entered.world_size),
        "LOCAL_WORLD_SIZE": str(settings.nproc),
        "GROUP_RANK": str(entered.rank_of_node),
        "GROUP_WORLD_SIZE": str(len(entered.members)),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(entered.world_size),
        "MASTER_ADDR": host if settings.imports_library else entered.members[0].address,
        "MASTER_PORT": port,
        # Restarts of any kind, so that all nodes have the same number: torch's own count, of
        # failures on one node, differs between nodes.
        "TORCHELASTIC_RESTART_COUNT": str(entered.number - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": options.rdzv_id or settings.run.local.name,
        "TORCHELASTIC_USE_AGENT_STORE": str(settings.imports_library),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": variables().get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
