"""How what several ranks hold becomes one: sums, means, weighted pairs, votes."""
