"""Supervised fine-tuning: solvers show how it is done, a model learns to say the same."""
