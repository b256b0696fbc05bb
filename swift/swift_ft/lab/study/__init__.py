"""`swift-ft study`: what strategies cost two small tasks in time and in what is learned. No torch but in `trainers`.

settings    what a study is made of: tasks, strategies, rates, seeds; and the cells that follow
running     one cell as real processes, and what its run says of itself
figures     from cells to the figures of a study: means with a t interval
page        the study as one HTML page; drawing: its curves as SVG
command     the command; finished cells as files, so that a study that was stopped goes on
trainers    the scripts that train, as a user would write them
"""
