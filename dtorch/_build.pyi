# Written by native/build.py; this stub lets the package be checked before it is built.

TORCH_VERSION: str
CXX11_ABI: int
PYTHON: str
COMPILER: str
SANITIZE: str
