"""The Triton kernels of both operators, and how they are launched."""
