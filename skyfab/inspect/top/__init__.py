"""`skyfab top`: a live view of hosts and the runs on them."""
