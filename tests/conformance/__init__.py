"""PyTorch's own test material, run on dtorch and compared with eager PyTorch on the CPU bit by bit.

The material ships in the torch wheel (``torch.testing._internal``). A **part** is one collection of it: it has names,
and runs one name in a child process, which gives failures by check (``parts.py``).

* ``parts.py``: what a part is, and which there are;
* ``operators.py``: the part ``operators`` (op_db), with ``samples.py`` (arguments) and ``checks.py`` (ways to call);
* ``modules.py``, ``layers.py``, ``optimizers.py``, ``foreach.py``: the other parts, with ``cases.py`` for all four;
* ``observe.py``: what can be seen of a call (values, strides, aliases, exceptions), and how two sides differ;
* ``compare.py``: runs a call on both sides;
* ``child.py``: runs names in a process that may crash, and replaces a dead engine;
* ``run.py``: runs several children at once over many names;
* ``kept.py``: results in a file, so that a run can go on where it was interrupted;
* ``exclusions.py``, ``exclusions.txt``: what is known not to equal eager, and why;
* ``report.py``: what a run found, as lines and as the table of ``docs/conformance.md``.

``python -m tests.conformance --help`` runs it by hand, ``scripts/test.sh --conformance`` runs all of it.
"""
