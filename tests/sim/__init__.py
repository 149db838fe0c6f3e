"""The seeded simulator: production code over simulated links, processes and time.

    values      numbers in place of tensors (``Arithmetic``), and the plain loop that says what must come out
    engine      simulated time
    network     links: delays, cuts, blocks
    worker      one worker process: the production driver and step transaction
    cluster     the shell around the production controller, node agents, the disk
    wrongs      workers that compute wrongly, or with wrong parameters
    faults      what goes wrong, and at which protocol point
    checks      what must hold, at every moment and at the end
    job, world  what a seed decides, and the course of a run
    bugs        one rule of the protocol left out at a time: each must be caught

A seed decides every delay, death and choice, so a failing one can be replayed: python -m tests.sim --seed N --trace.
"""
