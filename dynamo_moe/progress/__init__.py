"""What a running export shows and measures of itself."""
