"""Scopes (`nb.cluster`, `nb.stage`, ...): their grammar, options, identity, and the stack of open ones.

`public` holds what a user writes, `frames` the open scopes, as capture reads them.
"""
