"""What the models of a recipe or a run answer, apart from training."""
