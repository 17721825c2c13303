"""Replay request traces through the production manager, and plan sizes from what they show."""
