"""The scripts that train in a study.

with_swift  two replicas under `swift-ft run`
plain       the same under torchrun, without any recovery
alone       the same in one process, to check a cell
tasks       their models, batches and held-out test sets
corpus      the bytes of the standard library's sources
told        what a script is given, and what it tells of its run
"""
