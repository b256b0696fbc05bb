"""Names of streams: who writes what.

``s2.F`` activations sent by stage 2, ``s2.B`` input gradients sent by it, ``s2.X`` what entered it from outside
the pipeline, ``s2.T`` its targets. With data parallelism every data-parallel rank of a stage has batches of its own:
rank 1 of them writes ``s2c1.F``. ``r5.C`` are the results of collectives as rank 5 saw them.
"""

KINDS = "FBXT"


def boundary(stage: int, kind: str, dp_rank: int = 0, dp_size: int = 1) -> str:
    """The stream of what `stage` sends (F, B) or takes in (X, T) in one pipeline of several."""
    return f"s{stage}.{kind}" if dp_size == 1 else f"s{stage}c{dp_rank}.{kind}"


def collectives(rank: int) -> str:
    return f"r{rank}.C"
