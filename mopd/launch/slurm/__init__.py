"""A run as a job of a Slurm cluster: what stands on which node, the script that says so, the job's states."""
