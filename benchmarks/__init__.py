"""dtorch's benchmarks: scripts beside this file, each run in a process of its own by ``dtorch bench NAME``."""
