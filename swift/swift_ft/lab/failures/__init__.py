"""Failures that are made on purpose (`swift_ft.fault_grammar` has the words for one failure).

    schedule       FILE or SPEC -> the failures, each with its coordinates; traces
    distributions  failures that a seed draws: exponential, Weibull, lemons, whole hosts
    injector       checks a schedule before a run starts, and makes happen what a rank cannot do to itself
    services       kills a job's services; damage: flips a bit of a log or of a checkpoint
    report         what was injected beside what was noticed

`swift_ft.train.fault_points` makes those happen that are at exact coordinates in a rank.
"""
