"""Diffusion fine-tuning as a task of the learner's loop: any pipeline whose denoiser can take adapters."""
