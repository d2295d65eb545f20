"""Rank maps: order of the tasks on given nodes, and the parameter servers among them."""
