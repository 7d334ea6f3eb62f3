"""The demo: train a small Swin-MoE on real images, export it, run it."""
