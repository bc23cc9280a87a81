"""What usually makes a proof fail is said in the order in which what differs makes it likely.

The loss of a step is computed before its update. If it differs, then the data or the forward
differed; if it is the same, then only what updates the state did.
"""

from elastic.check import plan
from elastic.check.compare import FirstDifference

_VARIABLE = (
    "a plain variable of the loop (a counter, the best loss, patience, the number of enumerate), from which a learning rate, a temperature "
    "or a decision follows: keep numbers in elastic.Values"
)
_OF_WORKER = (
    "a number of one worker alone: of the last shard that it computed, which the function of the step left in a variable or an attribute "
    "(return it, through step.sum), or of a part of the validation (run.evaluate)"
)
_LACKING = "an object that State lacks (an EMA copy, a schedule, a scaler, a queue or memory bank): name it in elastic.State"
_ATTRIBUTE = (
    "a plain attribute that changes with the steps, of an optimizer outside optimizer.state, of a module outside its buffers, or of a "
    "class: no state_dict has it, so that it begins again"
)
_HELD = "a name that the recipe holds for an object inside another one, which that one's load_state_dict replaces: look it up in each step"
_DATASET = (
    "a dataset that keeps something from sample to sample (a cache, a count of its calls, a change of its data in place) or draws from a "
    "generator of its own"
)
_FORWARD = "a forward that remembers earlier calls (a counter, a queue, a momentum update, an initialisation from the first batch)"
_EPOCH = "what the loop sets only where an epoch begins or ends, in the dataset, a module or a class: set it in every step, from step.epoch"
_FILE = (
    "a file that the recipe writes and reads back: a restart does not put back what it held then, and another rank or run may be "
    "writing it; keep it in elastic.Values"
)
_RANK = "run.rank or run.world_size in what is trained"
_SEED = "a generator of the recipe's own, the clock, a model that is built before elastic.start"
_SET = "objects in the order of a set, or of memory addresses"

# Of each proof: what it shows; likely causes where the loss of the step differs; and where it is
# the same.
_USUAL = {
    plan.AGAIN: (
        "something does not come from the run's seed",
        (_SEED, _DATASET, _SET, _FILE),
        (_SEED, _SET, _FILE),
    ),
    plan.MORE_WORKERS: (
        "the result depends on which worker computes which shard",
        (_FORWARD, _DATASET, _RANK, _FILE),
        (_RANK, _FORWARD, _DATASET, _FILE),
    ),
    plan.KILLED: (
        "what a restart restores is not all that the loop depends on",
        (_LACKING, _DATASET, _VARIABLE, _EPOCH, _ATTRIBUTE, _HELD, _FILE),
        (_VARIABLE, _HELD, _ATTRIBUTE, _LACKING, _FILE),
    ),
}
_USUAL[plan.DRAINED] = _USUAL[plan.CHECKPOINT] = _USUAL[plan.KILLED]
_GRADIENT = (
    "the gradient is not that of the whole batch, though it is the same for every number of workers. Usual causes: the loss is no "
    "mean over samples (a sum; a mean over words where shards have different numbers of them), or it couples samples (a contrastive "
    "loss sees those of one shard): build it from step.sum; a forward normalises by a buffer that it has just updated from its shard; or a hook on a gradient is not linear (a clip): "
    "it is called for each shard"
)


def cause(proof: str, found: FirstDifference | None) -> str:
    """Sentences for people. found: None where a proof compares no steps."""
    if proof == plan.GRADIENT:
        return _GRADIENT
    shows, of_forward, of_update = _USUAL[proof]
    if found is not None and found.is_logged_alone:
        return f"{shows}. The state is the same, so only what is logged differs. Usual causes: {_OF_WORKER if proof == plan.MORE_WORKERS else _VARIABLE}"
    same_loss = found is not None and found.has_same_loss
    return f"{shows}. Usual causes, the likeliest first: {'; '.join(of_update if same_loss else of_forward)}"
