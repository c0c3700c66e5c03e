"""A model in parts has the names of the whole one, or is refused."""

import pytest
import torch
from torch import nn

import yeto.tuning.shard
from yeto.errors import ConfigError
from yeto.tuning.shard import shard_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(2)])


@pytest.fixture
def wrapped_under(monkeypatch):
    """Have blocks wrapped as other releases of PyTorch do it: in a module of a given name."""

    def use(name):
        def wrap(module, **_):
            if isinstance(module, nn.Sequential):
                module.add_module(name, nn.Sequential(module._modules.pop("0")))

        monkeypatch.setattr(yeto.tuning.shard, "fully_shard", wrap)

    monkeypatch.setattr(yeto.tuning.shard, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(yeto.tuning.shard.dist, "get_world_size", lambda: 1)
    return use


def test_names_of_parameters_survive_the_wrapping_or_it_is_refused(wrapped_under):
    wrapped_under("_fsdp_wrapped_module")
    shard_model(Net(), torch.device("cpu"))
    wrapped_under("inner")
    with pytest.raises(
        ConfigError, match=r"2 unknown \(layers\.0\.inner\.0\.weight, layers\.1\.inner\.0\.weight\)"
    ):
        shard_model(Net(), torch.device("cpu"))
