"""Readable runs of the protocol: a setting, faults, and what followed, as the simulator saw it. See README.md here."""
