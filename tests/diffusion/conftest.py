"""What all tests of the diffusion task share."""

import torch

torch.set_num_threads(1)
