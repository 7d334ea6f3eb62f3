"""What experts over several devices cost."""
