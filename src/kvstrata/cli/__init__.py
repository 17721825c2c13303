"""The `kvstrata` command, one module per verb."""
