"""`swift-ft bench recovery`: the systems side by side, each with a trainer as its user would write it.

`trial` is what their trainers share, `systems` how each is installed and started, `report` what comes out.
"""
