"""Accounts of users that may train in an owner's cluster, and their login by password, token or invitation."""
