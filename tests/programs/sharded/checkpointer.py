"""Checkpoints to which every rank writes its own part."""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def latest(folder):
    """The last step that was saved, or 0."""
    return max((int(path.parent.name) for path in Path(folder).glob("*/.metadata")), default=0)


def save(folder, step, model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{step}")


def load(folder, step, model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=f"{folder}/{step}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
