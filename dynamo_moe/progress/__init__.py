"""Progress and timing of a running export."""
