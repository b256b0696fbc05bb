"""`swift-ft bench recovery`: the systems side by side, each with a trainer as its user would write it.

`trial` is what their trainers share, `marks` what is read from what they leave, `systems` how each is started,
`environments` what must be installed for it, `text` and `plot` what comes out.
"""
