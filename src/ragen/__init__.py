"""RAGEN trains language-model agents by multi-turn reinforcement learning, and shows why a run learns or collapses.

    from ragen import train

    run = train("sokoban", "model_path=pocket")

Importing this package loads nothing heavy: torch, transformers and ray are imported by the stages that use them.
"""

__version__ = "0.1.0"
