"""Ranks share the machine with each other: one thread each, and Gloo on the loopback device."""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
