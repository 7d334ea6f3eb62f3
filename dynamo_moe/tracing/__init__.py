"""From a PyTorch module to a graph of onnx_ir, in PyTorch's own exporters' steps."""
