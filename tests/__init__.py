"""Tests, by what they need: unit (nothing), ranks (processes), engine (real vLLM), e2e (the launcher), gpu."""
