"""PyTorch's own operator tests, run on dtorch and compared with eager PyTorch on the CPU bit by bit.

The material is the OpInfo database that ships in the torch wheel (``torch.testing._internal``). The parts:

* ``samples.py``: an operator's samples, and copies of one on a device;
* ``observe.py``: what can be seen of a call (values, strides, aliases, exceptions), and how two sides differ;
* ``checks.py``: the ways an operator is called (forward, in place, out=, backward, wrong calls);
* ``child.py``: runs the checks in a process that may crash, and replaces a dead engine;
* ``run.py``: runs children over many operators and settles their results with ``exclusions.txt``.

``python -m tests.conformance --help`` runs it by hand.
"""
