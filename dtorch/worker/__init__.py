"""The workers: the processes that execute operators.

``preload.py`` is what the fork server imports once, ``process.py`` what a forked worker does. The executor itself is
C++ (``dtorch._worker``).
"""
