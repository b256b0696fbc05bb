"""`swift-ft bench recovery`: the systems that are compared, each with a trainer as its user would write it.

`trial` is shared by their trainers, `systems` starts each of them.
"""
