"""MoE nodes: their schemas, what PyTorch operators become them, and their bodies."""
