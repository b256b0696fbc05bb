"""The scripts that train in a study.

with_swift  two replicas under `swift-ft run`
plain       the same under torchrun, without any recovery
alone       the same in one process, to check a cell
tasks       their models, batches and held-out test sets
corpus      the bytes of the standard library's sources
arguments   what a script is given, and the lines that it writes about its run
"""
