"""Examines hosts, and what is between them: findings, each with its fix."""
