"""What other programs take from a run: graphs (ONNX, torch.export), a folder for the Hugging Face hub, an MLPerf log.

Each is checked against the run itself before it stays: a graph's logits, a log's order.
"""
