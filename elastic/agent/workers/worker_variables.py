"""A worker has torchrun's variables, so that a script written for torchrun runs unchanged.

`ELASTIC_AGENT` holds what this library's own workers need beside them (config/environment.py).
"""

import os

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from elastic.agent.settings import Settings
from elastic.agent.workers.node_workers import WorkerStart
from elastic.config.environment import AgentLink, variables
from elastic.divergence import Divergence


def worker_starts(  # noqa: PLR0913 - what changes from generation to generation
    worker_group: WorkerGroup,
    settings: Settings,
    *,
    generation: int,
    failures: int,
    committed_step: int,
    divergence: Divergence | None,
    control_page: str,
    memory: str,
    uploader: str,
    is_rehearsal: bool,
) -> list[WorkerStart]:
    """How to start each worker of a generation."""
    options = settings.options
    link = AgentLink(
        pid=os.getpid(),
        node=settings.node,
        run_dir=settings.run.url,
        generation=generation,
        control_page=control_page,
        uploader=uploader,
        save_every=str(options.save_every),
        snapshot_every=str(options.snapshot_every),
        audit=str(options.audit),
        balance=options.balance,
        memory=memory,
        failures=failures,
        committed_step=committed_step,
        divergence=divergence,
        error_folder=str(settings.error_folder(generation)),
        faults=options.faults,
        parent=None if settings.declared is None else settings.declared.parent,
        imports_library=settings.imports_library,
        rehearse=str(options.rehearse),
        disturbs=is_rehearsal,
        accepts=options.accept,
        evidence=str(settings.scratch / "evidence.json") if settings.does_steps_again else "",
    )
    return [
        WorkerStart(
            rank=worker.global_rank,
            local_rank=worker.local_rank,
            command=(options.recipe, *options.recipe_args),
            env=variables() | launcher_variables(worker_group, worker, generation) | link.to_env(),
            log=settings.run.free_log(generation=generation, rank=worker.global_rank),
            is_plain=not settings.imports_library,
        )
        for worker in worker_group.workers
    ]


def launcher_variables(worker_group: WorkerGroup, worker: Worker, generation: int) -> dict[str, str]:
    spec = worker_group.spec
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_RANK": str(worker_group.group_rank),
        "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(worker_group.master_addr),
        "MASTER_PORT": str(worker_group.master_port),
        # Restarts of any kind, so that all nodes have the same number: torch's own count, of
        # failures on one node, differs between nodes.
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": variables().get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
