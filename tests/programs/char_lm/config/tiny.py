# a model that a CPU trains in seconds
out_dir = "out-tiny"
width, heads, layers, context = 32, 2, 1, 32
max_iters = 30
learning_rate = 1e-2
