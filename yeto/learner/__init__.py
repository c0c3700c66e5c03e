"""The learner: a training loop that never waits for the network, and its client.

* The process: ``app`` (of a rank that is not the head, ``follower``), ``config`` and ``leaving``.
* Training: the ``trainer``, with the ``equipment`` that it makes of a ``task``; the inner ``loop``, its
  ``gradients`` and its ``chance``; the ``ending``.
* The boundary: ``boundary``, the book of ``anchors`` with its ``pages``, live ``fragments``; what passes is
  ``exchanged`` through the ``mailbox``.
* The network: ``client``, ``connection``, ``identity``, ``incoming``, ``push``, ``bells``, ``last_words``.
* Several ranks: ``ranks``, ``island``, ``crew``, ``watch`` and ``sharded``.
* What outlives the process: ``saved_keeper``, ``saved_folder``, ``saved``, ``saved_files``, ``saved_ranks``.
* Before a run: the ``check``, with its ``probe`` of the syncer.
* What people see: ``progress``, ``pace``, ``run_log``, ``sinks`` and ``stopwatch``.
"""
