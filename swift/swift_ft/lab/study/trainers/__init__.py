"""The scripts that train in a study. Each is given JSON on its command line: directory, task, seed, steps, …

with_swift  two replicas under `swift-ft run`
plain       the same under torchrun, without any recovery
alone       the same in one process, to check a cell
tasks       their models, batches and held-out test sets

(every rank) mark "begun" → for each step "stepped", with the ranks whose batches are in it → "ended"
"""
