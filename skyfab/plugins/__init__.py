"""Plugins: what frameworks need before a function's first line."""

# The functions take the place of the modules of the same names, which are reached by `from … import` only. They are
# imported here and at once: a module that is imported later would hide its function.
from skyfab.plugins.accelerate import accelerate
from skyfab.plugins.base import Plugin
from skyfab.plugins.huggingface import huggingface
from skyfab.plugins.jax import jax
from skyfab.plugins.keras import keras
from skyfab.plugins.torch import torch

__all__ = ["Plugin", "accelerate", "huggingface", "jax", "keras", "torch"]
