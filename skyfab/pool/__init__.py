"""Compute: its nodes, scheduler and gangs."""
