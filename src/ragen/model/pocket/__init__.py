"""The embedded model: a tokenizer, a recipe, and weights of a few megabytes."""
