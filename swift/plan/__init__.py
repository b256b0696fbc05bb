"""What to log: which boundaries, what that costs, how quickly the job is back. Pure; no torch.

profile   what is known of a job, as JSON; every fault in it is one line
running   the same of a job that runs: what is given, and who knows the rest
model     storage, overhead and recovery time of contiguous recovery groups (docs/planning.md)
frontier  the exact trade between bytes and recovery time: dynamic programs
greedy    SWIFT's merge, the paper's baseline
interval  how often to save a checkpoint: Young and Daly with the log's own terms
verdict   whether the log pays, in bytes and in time
report    all of it as one document, and as a table
plot      the frontier as SVG
command   the command line

And what losses cost a job with replicas, `--adaptive` (docs/adaptive.md):

adaptive  its flags
rerouted  the throughput by number of losses, as a document and as a table
exact     the shortest step of a small job, by an integer program
gantt     a step as SVG

And the share of time that is training, `--goodput` (docs/goodput.md): the folder `goodput`.
"""
