"""The policy's side: loading it, its log-probabilities without full logits, and the losses."""
