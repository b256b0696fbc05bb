"""`swift-ft drill`: one job, twice, with faults and without; `run` collects the evidence, `report` judges it."""
