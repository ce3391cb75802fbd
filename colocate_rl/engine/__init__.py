"""Inference engines: the protocol the rollout speaks, vLLM's implementation of it, and the weights' way into it."""
