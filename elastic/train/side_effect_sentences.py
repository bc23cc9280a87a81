"""What a user reads where the function of a step leaves something behind that others would lack.

It says what was found, why it cannot be exact, and what to write instead.
"""

from elastic.train.left_sentences import FUNCTION


def of_memory(name: str) -> str:
    return (
        f"{name} changes with each call of {FUNCTION}, which every worker calls for its own shards alone, so that it depends on "
        "the number of workers. What is to be added up: return it from the function, through step.sum, and add the sum in the loop's "
        "body, to a buffer or to elastic.Values in the State. What follows the step: set it from step.number before the call. "
        "What collects outputs: empty it when the function begins"
    )


def of_store(name: str) -> str:
    return (
        f"{name} is filled by {FUNCTION}, and so by each worker with its own shards only. Return the numbers through step.sum (those of "
        "samples at their places in a tensor of zeros, such as torch.zeros(len(dataset)).index_add(0, batch.indices, errors)), and write "
        "the sum in the loop's body, to a buffer or an object of the State"
    )


def of_scratch(name: str) -> str:
    return (
        f"{name} is written anew by each call of {FUNCTION}, and then holds what is of this worker's last shard. Make a fresh one inside the function "
        "and leave this one out: noise = torch.randn_like(x) in the place of noise.normal_(), y = torch.mul(x, 2) in the place of out=y. What the loop "
        "needs of it: return it from the function, through step.sum"
    )


def of_initialisation(name: str) -> str:
    return (
        f"{name} keeps what {FUNCTION} found in the first shard that this worker computed, and each worker begins with another one. "
        "Initialise it before the loop, on fixed samples"
    )


def of_weights(name: str) -> str:
    return (
        f"{name} keeps what {FUNCTION} made of the weights at its first call, and later calls find it there: a worker that resumes, or that "
        "begins with another shard, would make something else. What is to last (a copy of the model for a penalty, a teacher): make it before the "
        "loop, give it to the State, and change it in the loop's body. What belongs to one step: make it in the body of each step, before the call"
    )


def of_generator(name: str) -> str:
    return (
        f"{FUNCTION} draws from {name}, a generator of its own, so that the numbers depend on which shards this worker computed before. "
        "Use the global generators of torch, Python or NumPy: they are keyed for each shard"
    )
