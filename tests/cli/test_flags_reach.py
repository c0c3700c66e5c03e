"""Each flag changes what it says and nothing else: one that goes elsewhere makes a run of another kind."""

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import attrs
import pytest

from yeto.cli import launch_flags, run_local, simulate_flags
from yeto.cli.policy import PolicyFlags
from yeto.cli.run_learner import LearnerFlags
from yeto.cli.run_syncer import SyncerFlags
from yeto.errors import ConfigError
from yeto.syncer.config import Bounds, StartMode

POLICY = {
    "total_steps": (90, {"total_steps": 90}),
    "wait_for": (3, {"wait_for": 3}),
    "start_timeout_s": (5.0, {"start_timeout_seconds": 5.0}),
    "quorum": (2, {"quorum": 2}),
    "quorum_timeout_s": (7.0, {"quorum_timeout_seconds": 7.0, "final_ack_timeout_seconds": 7.0}),
    "final_ack_timeout_s": (8.0, {"final_ack_timeout_seconds": 8.0}),
    "grace_ms": (500.0, {"grace_cap_seconds": 0.5}),
    "grace_gamma": (0.5, {"grace_gamma": 0.5}),
    "grace_tau": (3.0, {"grace_tau": 3.0}),
    "pipeline": (5, {"pipeline": 5}),
    "sync_interval_steps": (6.0, {"sync_interval_steps": 6.0}),
    "min_round_interval_ms": (250.0, {"min_round_interval_seconds": 0.25}),
    "delta_correction": ("none", {"delta_correction": "none"}),
    "outer": ("normalised", {"outer": "normalised"}),
    "outer_lr": (0.5, {"outer": "stock", "outer_lr": 0.5}),
    "outer_momentum": (0.5, {"outer": "stock", "outer_momentum": 0.5}),
    "outer_normalised": (True, {"outer": "normalised"}),
    "closing_sweep": ("off", {"closing_sweep": "off"}),
    "learner_weight": ("equal", {"learner_weight": "equal"}),
    "max_base_lag": (4, {"max_base_lag": 4}),
    "max_norm_ratio": (3.0, {"max_norm_ratio": 3.0}),
    "checkpoint_every": (2, {"checkpoint_every": 2}),
    "mark_final_checkpoint": (True, {"mark_final_checkpoint": True}),
    "stop_budget_s": (1.0, {"stop_budget_seconds": 1.0}),
    "learner_budget_steps": (6, {"learner_budget_steps": 6}),
    "budget_finish": (True, {"budget_finish": True}),
}
LEARNER = {
    "learner_id": 2,
    "num_learners": 5,
    "output_dir": "elsewhere",
    "max_local_steps": 70,
    "eval_every": 3,
    "log_jsonl": "log.jsonl",
    "tensorboard": "curves",
    "wandb": "project",
    "state_dir": "state",
    "state_every": 7,
    "seed": 11,
    "inner_lr": 0.5,
    "weight_decay": 0.5,
    "warmup_steps": 3,
    "lr_schedule": "cosine",
    "clip_norm": 2.0,
    "grad_accum": 4,
    "torch_threads": 3,
    "fragments": 5,
    "fragment_pattern": "strided",
    "matrix_merge": "iso",
    "wire_dtype": "q4",
    "wan_streams": 1,
    "merge_alpha": 0.25,
    "q4_error_feedback": False,
    "model": "other",
    "model_revision": "v2",
    "trust_remote_code": True,
    "data": "other.jsonl",
    "data_revision": "v3",
    "data_format": "qa",
    "columns": "user=q,assistant=a",
    "data_shard": "off",
    "eval_data": "held.jsonl",
    "eval_rows": 5,
    "train_on": "all",
    "assistant_mask_mode": "legacy",
    "mask_report": 2,
    "seq_len": 64,
    "micro_batch_size": 3,
    "packing": "plain",
    "tokenize": "preload",
    "stream_workers": 1,
    "shuffle_buffer": 9,
    "tuning": "full",
    "lora_r": 3,
    "lora_alpha": 5,
    "lora_dropout": 0.5,
    "lora_targets": "attention",
    "base_dtype": "f32",
    "gradient_checkpointing": "on",
    "compile": "on",
    "device": "cpu",
    "shard": "fsdp",
    "height": 64,
    "width": 32,
    "resize_mode": "stretch",
    "learner_budget_steps": 80,
    "give_up_after": 5.0,
    "rank_timeout": 500.0,
    "diffusion_loss_weighting": "snr",
    "no_manifest": True,
}
RENAMED = {
    "learner_budget_steps": {"budget_steps": 80},
    "give_up_after": {"give_up_seconds": 5.0},
    "rank_timeout": {"rank_timeout_seconds": 500.0},
    "diffusion_loss_weighting": {"loss_weighting": "snr"},
    "no_manifest": {"send_manifest": False},
}
WITH_FILES = {"syncer", "task", "chat_template", "auth_key_file", "tls_ca", "tls_cert", "tls_key"}
"""Flags of a learner that other tests follow, because they name files, or belong together."""


def differences(before, after):
    return {
        field.name: getattr(after, field.name)
        for field in attrs.fields(type(before))
        if getattr(after, field.name) != getattr(before, field.name)
    }


def test_every_flag_of_the_coordinator():
    assert POLICY.keys() | {"learners"} == {field.name for field in attrs.fields(PolicyFlags)}
    base = {"learners": 4, "total_steps": 9}
    before = PolicyFlags(**base).core_config()
    for flag, (value, expected) in POLICY.items():
        assert differences(before, PolicyFlags(**base | {flag: value}).core_config()) == expected, flag


def test_every_flag_of_the_syncer_itself():
    places = {
        "host": "localhost",
        "port": 1,
        "ready_file": Path("ready"),
        "checkpoint_path": Path("ckpt"),
        "keep_every": 3,
        "event_tape": Path("tape"),
        "record_payloads": Path("payloads"),
        "allow_unauthenticated": True,
    }
    told = {flag: (value, {flag: value}) for flag, value in places.items()}
    told |= {
        "resume": (True, {"start": StartMode.RESUME}),
        "resume_or_start": (True, {"start": StartMode.RESUME_OR_START}),
        "max_pending_handshakes": (5, {"bounds": Bounds(pending_handshakes=5)}),
    }
    pool = {
        "iso_worker_devices": ("cpu:0,cpu:1", {"devices": ("cpu:0", "cpu:1")}),
        "iso_worker_python": ("python3", {"python": "python3"}),
        "iso_worker_queue_capacity": (3, {"queue_capacity": 3}),
        "iso_worker_frame_mib": (1, {"frame_bytes_max": 1 << 20}),
        "iso_worker_startup_timeout_s": (3.0, {"startup_seconds": 3.0}),
        "iso_worker_request_timeout_s": (3.0, {"request_seconds": 3.0}),
        "iso_worker_drain_timeout_s": (3.0, {"drain_seconds": 3.0}),
    }
    elsewhere = {"auth_key_file", "tls_cert", "tls_key", "tls_client_ca", "require_profile_binding"}
    elsewhere |= {"http_port", "http_host", "http_token_file", "log_level", "iso_backend", "learners"}
    fields = {field.name for field in attrs.fields(SyncerFlags)}
    assert POLICY.keys() | told.keys() | pool.keys() | elsewhere == fields
    base = {"learners": 2, "total_steps": 9}
    before = SyncerFlags(**base).config()
    for flag, (value, expected) in told.items():
        assert differences(before, SyncerFlags(**base | {flag: value}).config()) == expected, flag
    base |= {"iso_worker_devices": "cpu"}
    before = SyncerFlags(**base).config()
    for flag, (value, expected) in pool.items():
        after = SyncerFlags(**base | {flag: value}).config()
        assert differences(before, after).keys() == {"svd"}, flag
        assert differences(before.svd, after.svd) == expected, flag


def test_every_flag_of_a_learner():
    beside = {"tls_server_name", "profile", "check"}
    assert LEARNER.keys() | WITH_FILES | beside == {field.name for field in attrs.fields(LearnerFlags)}
    base = {"syncer": "head:1", "model": "m", "data": "rows.jsonl", "num_learners": 4, "max_local_steps": 90}
    makers = (LearnerFlags.learner_config, LearnerFlags.text_config, LearnerFlags.diffusion_config)
    before = [make(LearnerFlags(**base)) for make in makers]
    for flag, value in LEARNER.items():
        flags = LearnerFlags(**base | {flag: value})
        # Diffusion has adapters only.
        after = [make(flags) for make in makers[: 2 if flag == "tuning" else 3]]
        expected = RENAMED.get(flag, {flag: value})
        found = [differences(old, new) for old, new in zip(before, after, strict=False)]
        assert any(found), flag
        for config, difference in zip(before, found, strict=False):
            known = {name: told for name, told in expected.items() if hasattr(config, name)}
            assert difference == known, flag


def test_every_flag_of_a_simulated_fleet():
    minutes, hours, milliseconds, megabits = 60.0, 3600.0, 1e-3, 125_000.0
    parts = {
        simulate_flags.LearnerFlags: {
            **dict.fromkeys(["step_seconds", "step_jitter", "phase_jitter", "latency_jitter"], ("", 1)),
            **dict.fromkeys(["tokens_per_step", "keeps_state", "state_every_steps"], ("", 1)),
            **dict.fromkeys(["joins_at", "leaves_at", "lockstep"], ("", 1)),
            "up_mbps": ("up_rate", megabits),
            "down_mbps": ("down_rate", megabits),
            "latency_ms": ("latency_seconds", milliseconds),
            "mean_up_hours": ("mean_up_seconds", hours),
            "repair_minutes": ("mean_repair_seconds", minutes),
            "mean_link_hours": ("mean_link_seconds", hours),
            "outage_seconds": ("mean_outage_seconds", 1),
        },
        simulate_flags.SyncerMachineFlags: {
            **dict.fromkeys(
                ["merge_seconds", "outer_seconds", "checkpoint_seconds", "older_checkpoint"], ("", 1)
            ),
            "syncer_up_mbps": ("up_rate", megabits),
            "syncer_down_mbps": ("down_rate", megabits),
            "fsync_ms": ("fsync_seconds", milliseconds),
            "syncer_mean_up_hours": ("mean_up_seconds", hours),
            "syncer_restart_seconds": ("mean_restart_seconds", 1),
            "queue_ms": ("queue_seconds", milliseconds),
        },
        simulate_flags.FaultFlags: {
            **{
                field.name: (field.name.removeprefix("fault_"), 1)
                for field in attrs.fields(simulate_flags.FaultFlags)
            },
            "faults_until": ("until_seconds", 1),
        },
    }
    makers = (
        lambda flags: flags.spec(4, 1e9),
        lambda flags: flags.spec(),
        lambda flags: flags.faults(),
    )
    for (kind, told), make in zip(parts.items(), makers, strict=True):
        assert told.keys() == {field.name for field in attrs.fields(kind)}
        for flag, (name, unit) in told.items():
            found = differences(make(kind()), make(kind(**{flag: 0.5})))
            assert found == {name or flag: 0.5 * unit}, flag


@pytest.mark.parametrize("command", [run_local, launch_flags])
def test_what_a_command_offers_can_be_chosen(command):
    """Each choice is taken, or refused with the flag that is missing: one that the command has."""
    learner = {"syncer": "head:1", "model": "m", "data": "rows.jsonl"}
    for part, kind, base, makers in (
        (command.LearnerPart, LearnerFlags, learner, (LearnerFlags.learner_config, LearnerFlags.task_config)),
        (command.SyncerPart, SyncerFlags, {"learners": 2, "total_steps": 9}, (SyncerFlags.config,)),
    ):
        offered = {"--" + field.name.replace("_", "-") for field in attrs.fields(part)}
        for field in attrs.fields(part):
            for value in choices(field.type):
                flags = kind(**base | {field.name: value})
                for make in makers:
                    missing = flags_that_are_missed(make, flags)
                    assert missing <= offered, f"{field.name} {value}: {missing}"


def flags_that_are_missed(make, flags):
    try:
        make(flags)
    except ConfigError as error:
        return set(re.findall(r"--[a-z][a-z-]+", str(error)))
    return set()


def choices(kind):
    """Return the values that a type names."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return [value for inner in get_args(kind) for value in choices(inner)]
