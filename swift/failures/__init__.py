"""Failures that are made on purpose: what a schedule of them is, and what became of it. Pure, without torch.

grammar       one failure in words, as `swift-ft drill --kill` and `swift-ft run --failures` take it
distributions failures that a seed draws: exponential, Weibull, lemons, whole hosts
traces        failures that a file tells of, and the converter for other people's files
schedule      FILE or SPEC -> the failures, each with its coordinates
report        what was injected beside what was noticed
damage        flips a bit of a log or of a checkpoint

`swift.runtime.faults` makes those happen that are at exact coordinates in a rank, `swift.launch.injector` the others.
"""
