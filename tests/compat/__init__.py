"""`scripts/compat`: which versions of torch and Python this checkout works with.

environment  a virtual environment for one pair of versions
seams        what is run in it: tests, trainers and drills that touch every seam with torch
table        the rows, as JSON and as the table of docs/compatibility.md
"""
