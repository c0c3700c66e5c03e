"""Yeto fine-tunes models across cheap, unreliable, far-apart GPU machines."""

__version__ = "0.1.0"
