"""Compiler passes: from a Program to a Cut with the fragments of each worker."""
