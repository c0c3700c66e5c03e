"""Bounds of one input, the same for both engines. Imports nothing: libFuzzer wants to see every import."""

INPUT_SECONDS = 10
"""An input that takes longer hangs."""
INPUT_BYTES_MAX = 4096
"""Longer inputs find nothing that these do not, only later."""
RSS_MIB_MAX = 1024
"""An input that makes the process larger than this was believed in something."""
