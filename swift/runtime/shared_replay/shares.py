"""Who computes which microbatches."""

import itertools


def workers(microbatches: int, available: int) -> int:
    """So many of the available ranks as make the largest share smaller, and no more."""
    largest = -(-microbatches // max(1, min(available, microbatches)))
    return -(-microbatches // largest)


def shares(microbatches: int, count: int) -> list[range]:
    """Runs of microbatches for `count` ranks in the order of the line. What does not divide goes to the first ones:
    the last one, the owner, has the optimizer's step to do besides."""
    each, left = divmod(microbatches, count)
    bounds = [0]
    for index in range(count):
        bounds.append(bounds[-1] + each + (index < left))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def memory_needed(weights: int, share: int) -> int:
    """Bytes for gradients of a share, beside the module and its activations: what is on its way up and down the line,
    and each microbatch's until those before them have come."""
    return weights * (2 + share)
