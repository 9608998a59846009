"""Unpacking weights in a kernel: codes and scales of every storage format, one file per idea."""
