"""The launcher, `swift-ft run`: torchrun's flags, but one dead rank is replaced and the others stay.

command     flags -> LaunchPlan -> run (flags: which there are)
failing     --failures: what is to fail, checked, and the report (injector: makes it happen; services_here,
            disk_filling, network_loss: what is done to whom)
agent       torch's elastic agent with children of its own: replaces a rank, restarts nobody else
children    processes: start, hand a rank to, signal, reap
forkserver  imports once what ranks need, and forks them
health      the operator's health check, and one run of it (check_runner: its own process; place_checks: which places)
decisions   what to do about an exit and a View; pure
link        notices to the coordinator (own thread), Views from it
machines    how machines know of each other, from the flags
rendezvous  which machine is which: there is one, or they have numbers
meeting     or they meet at the coordinator
torch_names every private torch name, checked at import
worker      what runs in each child before the script does
"""
