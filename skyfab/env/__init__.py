"""Environments on hosts: what a host is, what an image needs there, and how it gets it."""
