"""Hosts that are made for a pool and removed after it: containers, and boxes of Vagrant."""
