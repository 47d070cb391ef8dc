"""Local SGD: each cluster trains its own copy, and the copies are averaged every so many steps."""
