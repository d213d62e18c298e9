"""Parts of ``tools.make_toys``: the tasks, the random grammars, the recipes, and the score by full-vocabulary KL."""
