"""The controller: the process that stands between the client and the workers.

``process.py`` is the loop, ``workers.py`` starts the workers and notices their death, ``output.py`` collects what they
print. The per-record work is C++ (``dtorch._scheduler``). Torch is never imported here.
"""
