"""What a run does where nothing is said: another default is another run, for whoever repeats a command."""

import attrs

from yeto.cli.run_learner import LearnerFlags
from yeto.cli.run_syncer import SyncerFlags

SYNCER = {
    "host": "127.0.0.1",
    "port": 29400,
    "start_timeout_s": 3600,
    "quorum_timeout_s": 900,
    "grace_ms": 1000,
    "grace_gamma": 0.8,
    "grace_tau": 2,
    "pipeline": 2,
    "sync_interval_steps": 24,
    "min_round_interval_ms": 0,
    "delta_correction": "heloco",
    "closing_sweep": "plain",
    "learner_weight": "tokens2-over-steps",
    "checkpoint_every": 1,
    "keep_every": 0,
    "stop_budget_s": 20,
    "iso_worker_queue_capacity": 16,
    "iso_worker_frame_mib": 2048,
    "iso_worker_startup_timeout_s": 300,
    "iso_worker_request_timeout_s": 3540,
    "iso_worker_drain_timeout_s": 3600,
    "max_pending_handshakes": 64,
    "mark_final_checkpoint": False,
    "allow_unauthenticated": False,
    # None is what the coordinator makes of it, or that there is no such limit.
    **dict.fromkeys(["wait_for", "quorum", "final_ack_timeout_s", "outer", "outer_lr", "outer_momentum"]),
    **dict.fromkeys(["max_base_lag", "max_norm_ratio", "learner_budget_steps", "iso_backend", "http_port"]),
}
LEARNER = {
    "fragments": 8,
    "fragment_pattern": "binpack",
    "matrix_merge": "rda",
    "wire_dtype": "bf16",
    "wan_streams": 4,
    "merge_alpha": 0.5,
    "q4_error_feedback": True,
    "give_up_after": 3600,
    "state_every": 100,
    "seed": 0,
    "task": "text",
    "tuning": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0,
    "lora_targets": "auto",
    "base_dtype": "auto",
    "gradient_checkpointing": "auto",
    "compile": "off",
    "device": "auto",
    "shard": "ddp",
    "inner_lr": 3e-4,
    "weight_decay": 0.01,
    "warmup_steps": 10,
    "lr_schedule": "constant",
    "clip_norm": 1,
    "grad_accum": 1,
    "seq_len": 2048,
    "micro_batch_size": "auto",
    "train_on": "assistant",
    "assistant_mask_mode": "native",
    "data_format": "auto",
    "data_shard": "auto",
    "packing": "documents",
    "tokenize": "stream",
    "stream_workers": 2,
    "shuffle_buffer": 1024,
    "trust_remote_code": False,
    "no_manifest": False,
    "diffusion_loss_weighting": "none",
    **dict.fromkeys(["max_local_steps", "learner_budget_steps", "profile", "state_dir"]),
}


def test_the_defaults_of_a_run():
    for flags, expected in ((SyncerFlags, SYNCER), (LearnerFlags, LEARNER)):
        defaults = {field.name: field.default for field in attrs.fields(flags)}
        assert {name: defaults[name] for name in expected} == expected
