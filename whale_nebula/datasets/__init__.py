"""Datasets of an owner, for others to read: published interfaces, grants, the service, and its client."""
