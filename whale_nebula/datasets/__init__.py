"""Datasets of an owner, for others to read: published interfaces, who may read them, the service, and its client."""
