"""The operators that become one node: the registry, and how users add to it."""
