"""Fine-tuning of mask paths: the model's own answers in, an adapter out."""
