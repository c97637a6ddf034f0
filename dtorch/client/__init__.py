"""The client: the user's process, in which ``import dtorch`` registers the device.

``api.py`` is what the user sees, ``engine.py`` the processes behind it, ``native/client`` the operators.
"""
