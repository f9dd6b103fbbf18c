"""Hosts that are created for a pool and removed afterwards: containers, and Vagrant boxes."""
