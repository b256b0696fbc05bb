"""Sessions for other people's frameworks, each in a module that imports its framework.

huggingface a subclass of `transformers.Trainer`
lightning   a strategy for `lightning.pytorch.Trainer`
torchtitan  a subclass of its trainer
"""
