"""The expected share of time that is training, for every strategy, by formula and by simulation (docs/planning.md).

figures      durations of recoveries and overheads, each with its source; published failure data
cluster      ranks, nodes, replicas; the faults of a cluster
ways         parameters of each strategy in the model, and the strategies that are left out
simulation   the share by discrete events, many trials at once
report       the share in closed form and by simulation, as one document and as tables
command      `swift-ft plan --goodput`
"""
