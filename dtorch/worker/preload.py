"""What the fork server imports before it forks workers: torch, the executor and the worker's own code.

A forked worker finds all of it in memory, so any number of workers costs one import. The fork server must stay a plain
single-threaded process, or the forks are not safe: nothing here starts a thread, runs a parallel region (the OpenMP
runtime's threads do not survive a fork), touches CUDA, or makes a ZeroMQ context.
"""

import os

from dtorch import posix

# LIV-2: the fork server dies with the controller, from now on; importing torch takes seconds. The controller leads the
# session (LIV-6), which tells who the parent ought to be.
posix.die_with_parent(os.getsid(0))
posix.set_name("dtorch-fork")

import dtorch.worker.process  # noqa: E402, F401  # torch and dtorch._worker come with it
