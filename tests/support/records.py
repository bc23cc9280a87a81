"""A valid identity and a valid commit record, from which tests of damage start."""

from elastic.checkpoint.record import FORMAT, CommitRecord
from elastic.config.environment import AgentLink
from elastic.config.identity import Ancestor, Identity, Parent

IDENTITY = Identity(
    recipe="train.py",
    recipe_sha256="ab" * 32,
    arguments=("--epochs", "3"),
    seed=1,
    global_batch=64,
    shards=8,
    torch="2.11.0",
    device="cpu",
    threads=1,
)
PARENT = Parent(
    run_id="0123456789abcdef",
    url="/runs/first",
    step=40,
    digest="12" * 32,
    entries=("model",),
    ancestors=(Ancestor(run_id="fedcba9876543210", step=7, digest="34" * 32),),
)
LINK = AgentLink(pid=1, node="a", generation=1, control_page="", uploader="")
RECORD = CommitRecord(
    format=FORMAT,
    run_id=IDENTITY.run_id,
    step=3,
    generation=1,
    attempt="a-000001-01234567",
    size_bytes=1,
    sha256="0" * 64,
    checksum="0" * 64,
    digest="0" * 64,
    created=1.0,
)
