"""What others take from a run: graphs (ONNX, torch.export), a folder for the Hugging Face hub, an MLPerf log."""
