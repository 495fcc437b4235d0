"""Fine-tuning of the mask path."""
