"""Chunks from other hosts' memory: over TCP, between hosts that proved who they are."""

from kvstrata.tiers.p2p.tier import P2pTier

__all__ = ["P2pTier"]
