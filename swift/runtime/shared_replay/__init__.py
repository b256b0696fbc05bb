"""A lost stage is replayed by its owner and by survivors together, each with a share of every step's microbatches.

    owner     the rank that replays: runs the trainer's own step, but computes its share only
    helper    a survivor that builds the stage besides its own, and computes microbatches of it
    line      helpers in the order of their shares, the owner last: gradients go up it, weights down

Step by step: weights go down the line; all compute; the first adds its microbatches' gradients up as autograd does; the
next adds its own, one after the other, to what comes from before it; the owner ends with the sum that one process
would have got, to the bit, and does the rest of the trainer's step, which nobody else has to know.
"""
