"""Hosts: their names, addresses and settings, the inventory file that lists them, and how users select them."""
