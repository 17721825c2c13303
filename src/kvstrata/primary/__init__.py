"""The primary tier: host memory that the engine copies with."""
