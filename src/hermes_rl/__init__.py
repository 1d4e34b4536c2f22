"""Reinforcement-learning training of LLM agents, and the search for its hyperparameters."""

__version__ = "0.1.0"
