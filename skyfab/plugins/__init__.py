"""Plugins: set up a framework (PyTorch, JAX …) before a function runs: its packages, settings and process group."""

from collections.abc import Callable
from types import FunctionType
from typing import Final

# A plugin is a module with a function of the same name, and a line here. The functions replace the modules, which can
# only be imported by `from … import`. All are imported here: one that is imported later would replace its function.
from skyfab.plugins.accelerate import accelerate as accelerate
from skyfab.plugins.base import Plugin as Plugin
from skyfab.plugins.dask import dask as dask
from skyfab.plugins.huggingface import huggingface as huggingface
from skyfab.plugins.jax import jax as jax
from skyfab.plugins.joblib import joblib as joblib
from skyfab.plugins.keras import keras as keras
from skyfab.plugins.ray import ray as ray
from skyfab.plugins.torch import torch as torch

REGISTRY: Final[dict[str, Callable[..., Plugin]]] = {
    name: made for name, made in sorted(globals().items()) if isinstance(made, FunctionType)
}
"""All plugins by name: those that `skyfab run --with-plugin=NAME` finds."""
