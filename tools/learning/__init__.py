"""Parts of ``tools.measure_learning``: who competes, the distance by full-vocabulary KL, the tables."""
