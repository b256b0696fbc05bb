"""The expected share of time that is training, for every strategy (docs/planning.md).

figures      durations of recoveries and overheads, each with its source; published failure data
ways         the cluster; parameters of each strategy in the model, and the strategies that are left out
report       the share in closed form, as one document and as tables
command      `swift-ft plan --goodput`
"""
