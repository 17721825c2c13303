"""Chunks as files below one directory, bounded, verified, shared by any number of processes."""

from kvstrata.tiers.fs.tier import FsTier

__all__ = ["FsTier"]
