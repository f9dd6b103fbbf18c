"""What a host is and does right now: system, load, memory, disk, GPUs and who uses them; and conditions on that."""
