"""Figures, each beside what it is to be compared with, in one result format.

    python -m bench             all of them        make bench      the same
    python -m bench.step        steady state, beside plain DDP
    python -m bench.recovery    the pause after a kill

Run from the root of the repository. Results go to runs/bench.jsonl, one JSON object a line, and to the terminal.
"""
