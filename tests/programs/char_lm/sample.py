"""Continues a text with the model of out_dir."""

import os
import pickle

import torch
from model import Model, ModelConfig

out_dir = "out"
start = "one"
max_new_tokens = 30
exec(open("configurator.py").read())

checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location="cpu")
model = Model(ModelConfig(**checkpoint["model_args"]))
model.load_state_dict(checkpoint["model"])
model.eval()
with open(os.path.join("data", checkpoint["config"]["dataset"], "meta.pkl"), "rb") as file:
    chars = pickle.load(file)["chars"]
tokens = model.generate(torch.tensor([[chars.index(char) for char in start]]), max_new_tokens)
print("".join(chars[token] for token in tokens[0]))
