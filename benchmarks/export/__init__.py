"""What an export costs."""
