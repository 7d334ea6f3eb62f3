"""The passes over an exported graph before it is written."""
