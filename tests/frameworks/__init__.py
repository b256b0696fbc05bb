"""`scripts/frameworks`: the product under other people's frameworks, as they are on PyPI.

environment  a virtual environment for each framework, in a folder that git ignores
cases        what is run in it: the trainers of the framework's folder, killed, beside the same without a kill
table        the rows, as JSON and as the table of docs/frameworks.md
"""
