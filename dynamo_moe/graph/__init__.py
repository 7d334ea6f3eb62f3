"""What is done to an exported graph before it is written."""
