"""What scripts for other libraries import."""
