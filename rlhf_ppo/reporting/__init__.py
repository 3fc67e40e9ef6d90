"""What a run leaves to read: metrics, curves and a model card."""
