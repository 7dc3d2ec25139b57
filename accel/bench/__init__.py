"""Cases to measure, who can serve them, gates and clocks: for `python -m accel bench`, and for benchmarks/.

Top floor, beside cli.py. The surprise: providers call upstreams by name, imported when they are asked for.
"""
