"""The one tree of errors, split by who is to blame.

    EverstepError
    ├── UsageError            whoever called: the command line, a busy run directory      exit 2
    │   └── ConfigError       the job file; names the field and the cure                  exit 2
    ├── DataError             a data file: missing, short, torn, of another kind          exit 2
    ├── RecipeError           the user's recipe raised, or breaks its contract            exit 3
    ├── HostError             this machine: a taken port, a full disk, another class      exit 3
    ├── PeerError             a peer's link broke, or it spoke out of turn                (handled)
    ├── CorruptionError       this machine's memory or arithmetic: its worker ends        exit 4
    └── InternalError         Everstep itself: a rule of its own protocol does not hold   exit 3

A message is one line that names the field or file and the cure.
The tree is rooted here because imports go elastic -> runtime -> dataloader.
"""

from __future__ import annotations


class EverstepError(Exception):
    """Root of every error that Everstep raises on purpose. ``exit_code`` is the process's."""

    exit_code = 3


class UsageError(EverstepError):
    """The caller asked for something that can't be done."""

    exit_code = 2


class ConfigError(UsageError):
    """The job file is wrong; the message names the field and the cure."""


class DataError(EverstepError):
    """A data file is missing, short, torn or of another kind than expected."""

    exit_code = 2


class RecipeError(EverstepError):
    """The user's recipe raised or breaks its contract."""


class HostError(EverstepError):
    """This machine can't do it: a taken port, a full disk, another numerics class."""


class PeerError(EverstepError):
    """A peer's link broke, or it spoke out of turn."""


class CorruptionError(EverstepError):
    """What a worker holds is not what it was given: its memory or its arithmetic is broken, and nobody else's."""

    exit_code = 4


class InternalError(EverstepError):
    """A rule of Everstep's own protocol does not hold. A bug, or broken hardware."""
