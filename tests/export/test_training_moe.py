"""Training graphs of models with MoE layers: one node for each layer and direction."""
