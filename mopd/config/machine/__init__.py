"""What follows from a recipe and a description of its machines alone: what ``auto`` becomes, and who has which GPU."""
