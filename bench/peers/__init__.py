"""Everstep and the tools beside it, each in a venv of its own, on one workload and one schedule of kills.

workload.py                  model, data, batch, padding: the same in all, and all that a peer's venv imports of ours
step_lines.py                what a worker writes down, step by step
everstep_job.py torchft_ddp.py torchrun_ddp.py ray_train_ddp.py      one system each: how it is set up and run
accounting.py                from lines to figures; pure
measuring.py                 one job under one schedule of kills
page.py plot.py              docs/recovery.md, docs/recovery.svg
"""
