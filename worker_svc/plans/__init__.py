"""What a worker is told to run."""
