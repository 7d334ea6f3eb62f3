"""Private names of other packages, a module for each purpose, and what stands in for each of them.

Other modules of this package use none, but for nested containers (``dynamo_moe.pytree``) and the
shortcuts that replace functions of PyTorch's tracer (``dynamo_moe.tracing.remembered_*``). A test
checks that, and docs/explanation/architecture.md lists the names.
"""
