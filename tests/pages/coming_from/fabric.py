# after the last block
assert sorted(there) == sorted(here) == ["node1", "node2"]
assert kernel.strip() and "restart" in namespace.task_names and "exec" in namespace.task_names
