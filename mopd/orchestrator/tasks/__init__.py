"""Tasks of the orchestrator beside training, one a command."""
