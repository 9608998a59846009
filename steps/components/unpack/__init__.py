"""Unpacking weights in a kernel: codes, scales and values of every storage format, one file per idea."""
