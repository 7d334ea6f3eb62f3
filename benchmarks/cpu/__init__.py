"""How fast models and layers run on a CPU."""
