"""Clusters that train apart: each a copy of the whole step, and every so many steps they tell each other how far they
have come (`nb.replica(sync_every=...)`).
"""
