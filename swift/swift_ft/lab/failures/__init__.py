"""Injected failures (`swift_ft.fault_grammar` parses the specification of one failure).

    schedule       FILE or SPEC -> failures with coordinates: single ones, distributions drawn by a seed, traces
    injector       checks a schedule before a run starts; injects what a rank cannot do to itself
    services       kills and restarts a job's services; damage: flips a bit of a log or of a checkpoint
    report         compares the injected failures with the detected ones

`swift_ft.train.fault_points` injects the failures that happen at exact coordinates inside a rank.
"""
