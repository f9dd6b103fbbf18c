"""Remote tensors: PyTorch in this program, with the memory and the computation on a host."""
