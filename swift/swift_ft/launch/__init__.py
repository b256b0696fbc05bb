"""The launcher, `swift-ft run`: torchrun's flags, but a dead rank is replaced while the others stay.

command       the flags -> LaunchPlan -> run
agent         the main loop: replaces a rank, restarts no other
decisions     the response to an exit; pure
children      processes: start, assign a rank, signal, reap; spares: warm ones, and rehearsals
death         learns of a death before a pidfd shows it, and whether memory ran out
forkserver    imports the modules of ranks once, and forks ranks
worker        main program of each child before the script; ranks: its inputs
link          notices to the coordinator, Views from it
rendezvous    numbers of machines
health_check  the operator's check of a place, and one run of it
"""
