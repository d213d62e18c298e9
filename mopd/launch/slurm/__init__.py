"""A run as a job of a Slurm cluster: which node has what, the job's script, its state."""
