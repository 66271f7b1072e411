"""Checkpoint, GGUF file or ONNX folder -> model directory; needs the ``export`` extra."""
