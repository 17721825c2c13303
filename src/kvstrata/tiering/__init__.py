"""The orchestrator: one primary and any number of secondary tiers below it."""
