"""Local SGD: each cluster trains a copy of its own, and they exchange what they learned every so many steps."""
