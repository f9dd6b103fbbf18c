"""Hosts: names, addresses, selection."""
