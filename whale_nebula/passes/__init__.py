"""Compiler passes: from a Program to a Cut, which gives each worker its fragments."""
