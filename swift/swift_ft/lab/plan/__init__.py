"""Plans which boundaries to log: storage, overhead and recovery time of each choice. Pure; no torch.

profile      input of the planner, as JSON; running_job: the profile that a running job has measured
model        storage, overhead and recovery time of contiguous recovery groups (docs/planning.md)
interval     how often to save a checkpoint: Young and Daly with the log's own terms
report       the exact frontier of bytes and recovery time, SWIFT's greedy merge, and the verdict
rerouted     `--adaptive`: the cost of lost ranks in a job with replicas (docs/adaptive.md)
command      the command line
"""
