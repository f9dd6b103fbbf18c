"""`skyfab doctor`: examines hosts and the network between them; each finding has its fix."""
