"""What to log: which boundaries, what that costs, how quickly the job is back. Pure; no torch.

profile      what is known of a job, as JSON; running_job: the same of a job that runs
model        storage, overhead and recovery time of contiguous recovery groups (docs/planning.md)
interval     how often to save a checkpoint: Young and Daly with the log's own terms
report       the exact frontier of bytes and recovery time, SWIFT's greedy merge, and the verdict; plot: as SVG
adaptive     what losses cost a job with replicas (docs/adaptive.md): rerouted
command      the command line
"""
