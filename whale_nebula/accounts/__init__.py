"""Accounts of a cluster's owner: who may train there, by password, token or invitation; and how they log in."""
