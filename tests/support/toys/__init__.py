"""Kernels of the tests, in a folder of their own: all files beside a kernel are its source."""
