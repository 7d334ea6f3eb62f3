"""Kernels for tests, in a separate folder because all files beside a kernel are its source."""
