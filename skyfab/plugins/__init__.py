"""Plugins: set up a framework (PyTorch, JAX …) before a function runs: its packages, settings and process group."""

# The functions replace the modules of the same names, which can only be imported by `from … import`. All are imported
# here: a module that is imported later would replace its function.
from skyfab.plugins.accelerate import accelerate
from skyfab.plugins.base import Plugin
from skyfab.plugins.huggingface import huggingface
from skyfab.plugins.jax import jax
from skyfab.plugins.keras import keras
from skyfab.plugins.torch import torch

__all__ = ["Plugin", "accelerate", "huggingface", "jax", "keras", "torch"]
