"""The hardware and current state of hosts: system, load, memory, disk, GPUs and who uses them; and conditions on it."""
