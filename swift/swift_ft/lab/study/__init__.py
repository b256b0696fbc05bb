"""`swift-ft study`: the cost of strategies in two small tasks, in time and accuracy. Only `trainers` imports torch.

settings    parameters of a study: tasks, strategies, rates, seeds; and the resulting cells
running     executes one cell as real processes, and evaluates what its ranks wrote
figures     from cells to the figures of a study: means with a t interval
page        the study as one HTML page, with drawings
command     the command; stores finished cells as files, so that a stopped study can be continued
trainers    the training scripts, as a user would write them, and the tasks
"""
