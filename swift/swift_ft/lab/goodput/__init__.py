"""The expected share of time that is training, for every strategy, by formula and by simulation (docs/goodput.md).

figures      what recoveries and overheads take, each with its source; published failure data
cluster      ranks, nodes, replicas, repairs; faults of a cluster as a file
ways         each strategy in the terms of the model, and those that are left out
simulation   the share by discrete events, many trials at once
report       the share in closed form beside the simulation, as one document and as tables
command      `swift-ft plan --goodput`
"""
