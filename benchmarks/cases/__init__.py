"""The benchmarks, one file for each group.

A case maps a `Bench` to figures; `registry` names the cases.
"""
