"""What every kind of fine-tuning does the same way: rows out of files, whose they are, which model it is.

The tasks (:mod:`yeto.text`, :mod:`yeto.diffusion`) stand on this room and never on each other.
"""
