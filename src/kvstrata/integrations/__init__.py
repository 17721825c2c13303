"""Ready connectors for engines: one module per engine, which translates and decides nothing."""
