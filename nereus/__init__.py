"""Nereus changes the parallel layout of a running RL post-training job."""

__version__ = "0.1.0"
