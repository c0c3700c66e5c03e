"""``tools/fuzz``: the targets of tests/harness/fuzz_targets.py under a fuzzer, with a corpus that is kept.

``corpus`` reads and writes what is kept, ``plain`` is a mutator of our own, ``with_atheris`` drives libFuzzer
where atheris is installed. Both run each target in a process of its own, because a bug may take it along.
"""
