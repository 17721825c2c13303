"""Secondary tiers: stores of chunks below the primary, one module or package each."""
