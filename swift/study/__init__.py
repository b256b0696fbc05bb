"""`swift-ft study`: what strategies cost two small tasks in time and in what is learned. No torch but in `trainers`.

settings    what a study is made of: tasks, strategies, rates, seeds; and the cells that follow
strategies  the strategies of a study: their flags, and whether they are exact
running     one cell as real processes, and what its run says of itself
cells       a finished cell as a file, so that a study that was stopped goes on
statistics  means with a t interval
figures     from cells to the figures of a study
drawing     loss curves, and accuracy against overhead, as SVG
page        the study as one HTML page
command     the command
trainers    the scripts that train, as a user would write them
"""
