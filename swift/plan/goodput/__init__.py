"""The expected share of time that is training, for every strategy, by formula and by simulation (docs/goodput.md).

figures     what recoveries and overheads take, each with its source; published failure data
trace       faults of a cluster, as a file
measured    figures out of a file: a bench's JSON, or names and values
cluster     ranks, nodes and replicas; how often a fault comes, and how long a repair takes
ways        each strategy in the terms of the model, and those that are left out
formula     the share in closed form
simulation  the same by discrete events, many trials at once
report      all of it as one document, and as tables
plot        the share against the size of the cluster, as SVG
flags       the command line, `swift-ft plan --goodput`
"""
