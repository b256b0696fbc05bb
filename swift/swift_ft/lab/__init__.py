"""The laboratory. No other package imports it; neither a trainer nor a server needs it.

drill         kills ranks of a real run and compares its bits with a run that did not fail
failures      failures of a run: schedules, traces, the injector, the report
bench         measures single parts against the limit of the machine
plan          which boundaries to log; goodput: the share of time that is training
determinism   checks whether a script is resumed exactly
study         the cost of strategies in two small tasks
command_line  what their command lines share
"""
