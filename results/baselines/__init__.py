"""The same products by others.

recorded.py   figures measured in another run: *.json beside this file
humming.py    the layers of the package `humming-kernels`, measured here
"""
