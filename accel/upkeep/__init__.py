"""compat_matrix.yaml against the releases that it describes: for `python -m accel matrix check`, and for the tests.

Top floor, beside cli.py. The surprise: releases are read in other processes and from their source text, never here.
"""
