"""Scopes (`nb.cluster`, `nb.stage`, ...): their grammar, options, identity, and the stack of open ones.

`public` has the scopes that a user writes, `frames` the open scopes that capture reads.
"""
