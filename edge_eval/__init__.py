"""How good and how fast a small language model is in Arabic, on a laptop without a GPU.

Start reading at schema.py (the data, in the order it flows), then evaluate.py (the loop).
"""

__version__ = "0.1.0"
