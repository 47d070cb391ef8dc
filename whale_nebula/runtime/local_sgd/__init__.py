"""Local SGD: each cluster trains its own copy of the weights, and the copies are averaged every few steps."""
