"""From the text of recipes to values: nodes with their places, and dataclasses made of them."""
