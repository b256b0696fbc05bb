"""The launcher, `swift-ft run`: torchrun's flags, but one dead rank is replaced and the others stay.

command       flags -> LaunchPlan -> run
agent         torch's elastic agent with children of its own: replaces a rank, restarts nobody else
decisions     what to do about an exit and a View; pure
children      processes: start, hand a rank to, signal, reap; spares: warm ones, and rehearsals
forkserver    imports once what ranks need, and forks them
worker        what runs in each child before the script does; ranks: what it is given
link          notices to the coordinator, Views from it
rendezvous    which machine is which
health_check  the operator's check of a place, and one run of it
torch_names   every private torch name, checked at import
"""
