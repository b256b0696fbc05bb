"""`swift-ft doctor`: is this machine fit for swift, and do the services answer?

facts    what was found, as plain data
gather   finds it: the only part that touches the machine
checks   judges it: pure functions
command  the command line
"""
