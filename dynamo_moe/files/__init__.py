"""ONNX files: reading, writing, and what their metadata says."""
