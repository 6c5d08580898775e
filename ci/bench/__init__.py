"""Timings, as ratios within one interleaved run. `python -m ci.bench` prints a table and one JSON line."""
