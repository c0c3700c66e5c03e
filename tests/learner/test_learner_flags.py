"""From command-line words to the configuration objects, without loading anything."""

import pytest
from attrs import fields
from cyclopts import App

from yeto.cli.run_learner import LearnerFlags, run_learner_command
from yeto.diffusion.config import DiffusionConfig
from yeto.errors import ConfigError
from yeto.layout import build_layout
from yeto.learner.config import LearnerConfig
from yeto.learner.identity import make_identity
from yeto.text.config import TextConfig
from yeto.wire import Hello


def parse(*words, syncer="10.0.0.1:29400"):
    def keep(flags: LearnerFlags):
        return flags

    app = App(name="learner", version_flags=[])
    app.default(keep)
    required = ["--syncer", syncer, "--model", "m", "--data", "rows.jsonl"]
    return app([*required, *words], exit_on_error=False, print_error=False, result_action="return_value")


def test_the_defaults_are_those_of_the_objects():
    flags = parse()
    learner, text = flags.learner_config(), flags.text_config()
    of_diffusion = parse("--task", "diffusion")
    diffusion = of_diffusion.task_config()
    assert of_diffusion.learner_config().unit == "samples"
    for config, given in (
        (learner, {"syncer", "output_dir"}),
        (text, {"model", "data"}),
        (diffusion, {"model", "data"}),
    ):
        for field in fields(type(config)):
            if field.name not in given:
                assert getattr(config, field.name) == field.default, field.name
    assert (learner.syncer, text.model, text.data) == ("10.0.0.1:29400", "m", "rows.jsonl")


def test_every_setting_of_the_objects_has_a_flag():
    flags = {field.name for field in fields(LearnerFlags)}
    other_names = {
        "auth_key": "auth_key_file",
        "give_up_seconds": "give_up_after",
        "send_manifest": "no_manifest",
        "budget_steps": "learner_budget_steps",
        "tls": "tls_ca",
        "rank_timeout_seconds": "rank_timeout",
        "loss_weighting": "diffusion_loss_weighting",
    }
    internal = {"first_connect_seconds", "rank", "num_ranks", "unit"}
    for config in (LearnerConfig, TextConfig, DiffusionConfig):
        for field in fields(config):
            assert other_names.get(field.name, field.name) in flags | internal, field.name


def test_flags_reach_their_object(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    flags = parse(
        *("--learner-id", "1", "--num-learners", "3", "--wire-dtype", "q4", "--no-q4-error-feedback"),
        *("--merge-alpha", "0", "--give-up-after", "60", "--no-manifest", "--auth-key-file", str(key)),
        *("--learner-budget-steps", "40", "--micro-batch-size", "4", "--torch-threads", "1"),
        *("--lora-r", "4", "--tuning", "lora", "--seed", "17"),
    )
    learner, text = flags.learner_config(), flags.text_config()
    assert (learner.learner_id, text.learner_id, learner.num_learners, text.num_learners) == (1, 1, 3, 3)
    assert (learner.wire_dtype, learner.q4_error_feedback, learner.merge_alpha) == ("q4", False, 0.0)
    assert (learner.give_up_seconds, learner.send_manifest, learner.auth_key) == (60.0, False, b"secret")
    assert (learner.budget_steps, learner.torch_threads) == (40, 1)
    assert (text.micro_batch_size, text.lora_r, text.seed) == (4, 4, 17)
    assert "secret" not in repr(learner)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learner-id", "2", "--num-learners", "2"], "--learner-id 2 is out of range"),
        (["--rank-timeout", "60"], "--rank-timeout 60: need at least 180 s"),
        (["--seq-len", "1"], "--seq-len 1: must be at least 2"),
        (["--tls-cert", "c.pem"], "--tls-cert and --tls-key: give both or none"),
        (
            ["--tls-cert", "c.pem", "--tls-key", "k.pem"],
            "--tls-cert c.pem: needs --tls-ca, which turns",
        ),
        (["--tls-server-name", "head"], "--tls-server-name head: needs --tls-ca"),
        (["--tls-ca", "no.pem"], "--tls-ca no.pem: No such file"),
    ],
)
def test_impossible_flags_are_refused_before_anything_is_loaded(words, message):
    with pytest.raises(ConfigError, match=message):
        run_learner_command(parse(*words))
    with pytest.raises(ConfigError, match="--syncer nowhere: must be HOST:PORT"):
        run_learner_command(parse(syncer="nowhere"))


def test_work_can_be_carried():
    assert parse("--merge-alpha", "carry").learner_config().carries
    assert not parse("--merge-alpha", "0.25").learner_config().carries
    with pytest.raises(ConfigError, match=r"--merge-alpha 1\.5: must lie in \[0, 1\).* or be carry"):
        parse("--merge-alpha", "1.5").learner_config()


def test_the_profile_goes_into_the_hello():
    layout = build_layout({"a.weight": (2, 3)})
    for words, stated in ((("--profile", "0A" * 32), bytes([10] * 32)), ((), None)):
        config = parse(*words).learner_config()
        hello = make_identity(config, layout, {}, ()).hello(config, generation=7)
        assert Hello.decode(hello).profile == stated
    with pytest.raises(ConfigError, match="--profile 0A: need the 64 hex digits that the syncer prints"):
        parse("--profile", "0A").learner_config()


def test_the_state_folder_and_its_rhythm(tmp_path):
    learner = parse("--state-dir", str(tmp_path), "--state-every", "20").learner_config()
    assert (learner.state_dir, learner.state_every) == (tmp_path, 20)
    with pytest.raises(ConfigError, match="--state-every 0: need at least 1"):
        parse("--state-every", "0").learner_config()


def test_diffusion_flags_reach_their_object():
    flags = parse(
        *("--task", "diffusion", "--height", "512", "--width", "768", "--resize-mode", "stretch"),
        *("--diffusion-loss-weighting", "min-snr", "--micro-batch-size", "4", "--lora-r", "8"),
        *("--shuffle-buffer", "7", "--learner-id", "1", "--num-learners", "2", "--eval-data", "held.jsonl"),
    )
    config = flags.task_config()
    assert isinstance(config, DiffusionConfig)
    assert (config.height, config.width, config.resize_mode) == (512, 768, "stretch")
    assert (config.loss_weighting, config.micro_batch_size, config.lora_r) == ("min-snr", 4, 8)
    assert (config.shuffle_buffer, config.learner_id, config.num_learners) == (7, 1, 2)
    assert config.eval_data == "held.jsonl"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "diffusion", "--seq-len", "64"), "--seq-len 64 is for --task text"),
        (("--task", "diffusion", "--shard", "fsdp"), "--shard fsdp is for --task text"),
        (("--task", "diffusion", "--compile", "on"), "--compile on is for --task text"),
        (("--task", "diffusion", "--columns", "user=q"), "--columns user=q is for --task text"),
        (("--height", "64"), "--height 64 is for --task diffusion"),
        (("--diffusion-loss-weighting", "snr"), "--diffusion-loss-weighting snr is for --task diffusion"),
        (("--task", "diffusion", "--tuning", "full"), "--tuning full is for --task text"),
        (("--task", "diffusion", "--height", "0"), "--height 0 must be from 1 to"),
        (("--task", "diffusion", "--lora-dropout", "1"), "--lora-dropout 1.0 must be in"),
    ],
)
def test_a_flag_of_the_other_task_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(*words).task_config()
